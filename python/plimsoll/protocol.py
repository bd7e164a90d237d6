"""Packing and parsing of messages, as docs/protocol.md defines them.

Parsing is strict: an answer that says anything but what was asked for is a
:class:`ProtocolError`, because pages of memory depend on it.
"""

import enum
import json
import math
import struct
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from plimsoll.errors import ProtocolError, ServiceError

MAGIC = 0x4D494C50
VERSION = 2
MAXIMUM_PACKET = 65536
MAXIMUM_DESCRIPTORS = 16
ANSWER = 1 << 15
HYPERPARAMETERS = 7

HEADER = struct.Struct("<IHHII")
_STATUS = struct.Struct("<I")
_WINDOW = struct.Struct("<Q")
_TRANSFER = struct.Struct("<IIQQQ")
_ACCUMULATE = struct.Struct("<IIQQQQ")
_RANGE = struct.Struct("<QQ")
_NUMBER = struct.Struct("<Q")
_STEP = struct.Struct("<QdII")
_WAIT_FOR_STEP, _PREPARED_STEP, _ARRIVING_STEP, _LEAVING_STEP, _SPECULATING = 1, 2, 4, 8, 16
_DECIDE = struct.Struct("<QdQ")
_SKIP_STEP = 1
_ARRIVED = struct.Struct("<QQQ")
_WITHOUT = struct.Struct("<QQQQ")
_NO_GRADIENTS = 1
_SET_STEP = struct.Struct("<QQ")
_KEEP_OWN_STEPS, _ROLL_BACK = 1, 2
_GIVE_BACK, _KEEP_TIER = 1, 2
OWN_STEPS = 4096  # of parameters that a request has at most
_GROUP = struct.Struct(f"<{HYPERPARAMETERS}d")
_ORDER = struct.Struct("<II")
_BEGIN_ANEW = 1
_RANGES = 4000  # that an order request has at most
_WAIT = struct.Struct("<QQQ")
_FLAGS = struct.Struct("<I")
_NORM = struct.Struct("<d")
_STEPPED = struct.Struct("<Qd")

MEND = "install a client and a service of one release"


class Kind(enum.IntEnum):
    """Kinds of requests."""

    OPEN = 1
    WINDOW = 2
    WRITE = 3
    READ = 4
    SET_STEP = 5
    READY = 6
    NORM = 7
    ACCUMULATE = 8
    CLEAR = 9
    STEP = 10
    WAIT = 11
    SAVE = 12
    SAVED = 13
    COMMIT = 14
    LOAD = 15
    STAT = 16
    CLOSE = 17
    PREPARE = 18
    ORDER = 20
    HOLD = 21
    OWN_STEPS = 22
    SET_OWN_STEPS = 23
    DELTA = 24
    DECIDE = 25


STATUSES = ("done", "malformed", "refused", "does_not_fit", "busy", "not_permitted", "out_of_order", "storage", "internal")

# Bytes of an element, by the names of types.
TYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
#: The conditions of states that the trainer updates.
CONDITIONS = ("new", "whole", "redo", "torn")

MASTER_WEIGHTS, FIRST_MOMENT, SECOND_MOMENT = 0, 1, 2
_FP32 = 2  # the numbers that accumulate adds


def pack(kind: Kind, number: int, body: bytes) -> bytes:
    """The packet of a request. ValueError where it is longer than a packet may be."""
    if HEADER.size + len(body) > MAXIMUM_PACKET:
        raise ValueError(
            f"{kind.name.lower()}: {len(body)} bytes: a message has at most {MAXIMUM_PACKET - HEADER.size}; "
            "keep larger things in files of their own"
        )
    return HEADER.pack(MAGIC, VERSION, kind, number, len(body)) + body


def pack_window(size: int) -> bytes:
    return _WINDOW.pack(size)


def pack_transfer(what: int, first: int, count: int, offset: int) -> bytes:
    return _TRANSFER.pack(what, 0, first, count, offset)


def pack_accumulate(number: int, first: int, count: int, offset: int) -> bytes:
    """Adds fp32 numbers; ``number`` counts these requests since the gradients were cleared, from 1."""
    return _ACCUMULATE.pack(_FP32, 0, first, count, offset, number)


def pack_range(first: int, count: int) -> bytes:
    return _RANGE.pack(first, count)


def pack_arrived(first: int, count: int, step: int) -> bytes:
    """Gradients of a step that has begun before they were there."""
    return _ARRIVED.pack(first, count, step)


def pack_missing(first: int, count: int, step: int) -> bytes:
    """Parameters that get no gradients in a step that has begun before."""
    return _WITHOUT.pack(first, count, step, _NO_GRADIENTS)


def pack_set_step(step: int, keep_own: bool) -> bytes:
    """The step of the state; with ``keep_own`` the parameters have had the steps of set_own_steps."""
    return _SET_STEP.pack(step, _KEEP_OWN_STEPS) if keep_own else _NUMBER.pack(step)


def pack_go_back(step: int) -> bytes:
    """The state before the last step, which a tier still has."""
    return _SET_STEP.pack(step, _ROLL_BACK)


def pack_close(give_back: bool, keep_tier: bool) -> bytes:
    return pack_flags(_GIVE_BACK * give_back | _KEEP_TIER * (give_back and keep_tier))


def pack_own_steps(first: int, steps: Sequence[int]) -> bytes:
    return struct.pack(f"<{1 + len(steps)}Q", first, *steps)


def parse_own_steps(result: bytes, count: int) -> Sequence[int]:
    """How many steps parameters have had."""
    if len(result) != 8 * count:
        raise ProtocolError(f"own_steps: a result of {len(result)} bytes: expected {8 * count}; {MEND}")
    return struct.unpack(f"<{count}Q", result)


def pack_number(number: int) -> bytes:
    return _NUMBER.pack(number)


def pack_step(
    step: int,
    grad_scale: float,
    wait: bool,
    groups: Optional[Sequence[Sequence[float]]],
    arriving: bool = False,
    left_alone: bytes = b"",
    speculates: bool = False,
) -> bytes:
    """A step; ``groups`` is None for one that was prepared. The gradients of an ``arriving`` one come after it. What becomes
    of one that ``speculates`` is decided later.

    ``left_alone`` has a bit for each parameter: see :func:`bits`.
    """
    flags = _WAIT_FOR_STEP * wait | _PREPARED_STEP * (groups is None) | _ARRIVING_STEP * arriving | _LEAVING_STEP * bool(left_alone)
    flags |= _SPECULATING * speculates
    head = _STEP.pack(step, grad_scale, flags, len(groups or ()))
    return head + b"".join(_GROUP.pack(*g) for g in groups or ()) + left_alone


def bits(numbers: Sequence[int], count: int) -> bytes:
    """A bit for each of ``count`` parameters: 1 for those of some numbers, the first in the lowest bit of a byte.

    No bytes for no numbers.
    """
    if not numbers:
        return b""
    found = bytearray((count + 7) // 8)
    for number in numbers:
        found[number // 8] |= 1 << number % 8
    return bytes(found)


def is_arriving(body: bytes) -> bool:
    """Whether the body of a step says that its gradients come after it."""
    return bool(_STEP.unpack_from(body)[2] & _ARRIVING_STEP)


def pack_decide(step: int, grad_scale: Optional[float]) -> bytes:
    """What becomes of a step that speculates: its factor, or None to skip it."""
    return _DECIDE.pack(step, 0.0, _SKIP_STEP) if grad_scale is None else _DECIDE.pack(step, grad_scale, 0)


def step_after(body: bytes) -> int:
    """The step of the state after a request to decide."""
    step, _, flags = _DECIDE.unpack(body)
    return step - bool(flags & _SKIP_STEP)


def is_arrived(body: bytes) -> bool:
    """Whether the body of ready is about a step that has begun before."""
    return len(body) in (_ARRIVED.size, _WITHOUT.size)


def pack_prepare(step: int, groups: Sequence[Sequence[float]], left_alone: bytes = b"") -> bytes:
    return pack_step(step, 0.0, False, groups, left_alone=left_alone)


def pack_order(ranges: Sequence[Tuple[int, int]]) -> Iterator[bytes]:
    """The bodies of the requests that tell an order anew: as many as it takes."""
    for start in range(0, max(len(ranges), 1), _RANGES):
        part = ranges[start : start + _RANGES]
        yield _ORDER.pack(_BEGIN_ANEW * (start == 0), len(part)) + b"".join(_RANGE.pack(*r) for r in part)


def pack_wait(step: int, first: int, count: int) -> bytes:
    return _WAIT.pack(step, first, count)


def pack_delta(*, begin: bool, whole: bool) -> bytes:
    """What of the parameters: what the last step has changed, nothing, or all."""
    return _NUMBER.pack(_WHOLE_DELTA if whole else _BEGIN_DELTA if begin else 0)


_BEGIN_DELTA, _WHOLE_DELTA = 1, 2


def pack_flags(flags: int) -> bytes:
    return _FLAGS.pack(flags)


def pack_document(document: Dict[str, Any]) -> bytes:
    # NaN is no JSON, and Python writes it unless told not to.
    return json.dumps(document, allow_nan=False).encode()


def parse_answer(packet: bytes, kind: Kind, number: int) -> bytes:
    """The result in an answer to request ``number`` of ``kind``.

    Raises ServiceError where the service has refused it, ProtocolError where the
    packet is no answer to it.
    """
    name = kind.name.lower()
    if len(packet) < HEADER.size:
        raise ProtocolError(f"{name}: an answer of {len(packet)} bytes: a header has {HEADER.size}; {MEND}")
    magic, version, answered, which, length = HEADER.unpack_from(packet)
    body = packet[HEADER.size :]
    for what, found, expected in (
        ("begins with", magic, MAGIC),
        ("is of version", version, VERSION),
        ("is of kind", answered, kind | ANSWER),
        ("has the number", which, number),
        ("says how many bytes follow:", length, len(body)),
    ):
        if found != expected:
            raise ProtocolError(f"{name}: an answer {what} {found:#x}: expected {expected:#x}; {MEND}")
    if len(body) < _STATUS.size:
        raise ProtocolError(f"{name}: an answer without a status; {MEND}")
    (status,) = _STATUS.unpack_from(body)
    result = body[_STATUS.size :]
    if status >= len(STATUSES):
        raise ProtocolError(f"{name}: status {status}: this version has 0 to {len(STATUSES) - 1}; {MEND}")
    if status:
        message = result.decode("utf-8", errors="replace") or f"{name}: the service gave no reason"
        raise ServiceError(STATUSES[status], message)
    return result


def _exactly(form: struct.Struct, result: bytes, kind: Kind) -> Tuple[Any, ...]:
    if len(result) != form.size:
        raise ProtocolError(f"{kind.name.lower()}: a result of {len(result)} bytes: expected {form.size}; {MEND}")
    return form.unpack(result)


def parse_nothing(result: bytes, kind: Kind) -> None:
    if result:
        raise ProtocolError(f"{kind.name.lower()}: a result of {len(result)} bytes: expected none; {MEND}")


def parse_norm(result: bytes) -> float:
    """The sum of the squares of a shard's gradients."""
    return _exactly(_NORM, result, Kind.NORM)[0]


def parse_stepped(result: bytes, kind: Kind) -> Tuple[int, float]:
    """A step, and the seconds that it took."""
    return _exactly(_STEPPED, result, kind)  # type: ignore[return-value]


def parse_number(result: bytes, kind: Kind) -> int:
    return _exactly(_NUMBER, result, kind)[0]


def parse_document(result: bytes, kind: Kind) -> Dict[str, Any]:
    try:
        document = json.loads(result.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{kind.name.lower()}: a result that is no JSON document: {error}; {MEND}") from None
    if not isinstance(document, dict):
        raise ProtocolError(
            f"{kind.name.lower()}: a result that is a JSON {type(document).__name__}: expected an object; {MEND}"
        )
    return document


def parse_loaded(result: bytes) -> Tuple[int, Any]:
    """The step of a checkpoint and the training document that is in it, None where there is none."""
    if len(result) < _NUMBER.size:
        raise ProtocolError(f"load: a result of {len(result)} bytes: expected at least {_NUMBER.size}; {MEND}")
    rest = result[_NUMBER.size :]
    try:
        training = json.loads(rest.decode("utf-8")) if rest else None
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"load: training is no JSON document: {error}; {MEND}") from None
    return _NUMBER.unpack_from(result)[0], training


@dataclass(frozen=True)
class ArenaDescription:
    """One arena of a session: ``bytes`` of elements of ``type`` in a file of ``mapped_bytes``."""

    name: str
    component: str
    type: str
    bytes: int
    mapped_bytes: int


@dataclass(frozen=True)
class Opened:
    """The result of open.

    ``prepared_step`` is the step that was prepared last, ``asked_step`` that which was asked for last, with
    ``asked_factor``. ``accumulated`` times was added to the gradients since they were cleared, which was at
    ``cleared_step``; ``accumulating`` is the number of what is half added, 0 for nothing. ``arriving_step`` is a step that
    waits for the gradients of this process, ``torn_step`` one that some of the state has had before its trainer ended.
    ``can_go_back`` says that a tier still has the state before the last step, ``retracts`` that the session has a log with
    which steps can be retracted.
    """

    attached: bool
    initialized: bool
    step: int
    can_go_back: bool
    retracts: bool
    prepared_step: int
    asked_step: int
    asked_factor: float
    arriving_step: int
    torn_step: int
    accumulated: int
    accumulating: int
    cleared_step: int
    elements: int
    service: str
    kernel: str
    arenas: List[ArenaDescription]


@dataclass(frozen=True)
class Held:
    """The result of hold. ``condition`` is one of CONDITIONS, ``step`` the last finished step."""

    attached: bool
    condition: str
    step: int
    service: str
    arenas: List[ArenaDescription]


def _member(document: Dict[str, Any], name: str, type_: type) -> Any:
    value = document.get(name)
    # bool is an int to Python, and a float may be a whole number to JSON.
    if type(value) is not type_:
        raise ProtocolError(f"open: {name} is {value!r}: expected {type_.__name__}; {MEND}")
    if type_ is int and not 0 <= value < 1 << 63:
        raise ProtocolError(f"open: {name} is {value}: expected a number of 0 or more, below 2^63; {MEND}")
    return value


def _asked_factor(document: Dict[str, Any]) -> float:
    value = document.get("asked_factor")
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ProtocolError(f"open: asked_factor is {value!r}: expected a finite number; {MEND}")
    return float(value)


def _arenas(document: Dict[str, Any]) -> List[ArenaDescription]:
    arenas = []
    for a in _member(document, "arenas", list):
        if not isinstance(a, dict):
            raise ProtocolError(f"open: an arena is {a!r}: expected an object; {MEND}")
        arenas.append(
            ArenaDescription(
                *(_member(a, n, str) for n in ("name", "component", "type")),
                *(_member(a, n, int) for n in ("bytes", "mapped_bytes")),
            )
        )
    return arenas


def parse_held(result: bytes, sizes: Dict[str, int]) -> Held:
    """The result of hold for arenas of these sizes, by component."""
    document = parse_document(result, Kind.HOLD)
    if document.get("schema") != "plimsoll.held/1":
        raise ProtocolError(f"hold: schema is {document.get('schema')!r}: expected 'plimsoll.held/1'; {MEND}")
    arenas = _arenas(document)
    found = {a.component: a.bytes for a in arenas}
    if found != sizes or len(arenas) != len(sizes) or any(a.mapped_bytes < a.bytes for a in arenas):
        raise ProtocolError(f"hold: the arenas are {found}: expected {sizes}; {MEND}")
    held = Held(
        attached=_member(document, "attached", bool),
        condition=_member(document, "condition", str),
        step=_member(document, "step", int),
        service=_member(document, "service", str),
        arenas=arenas,
    )
    if held.condition not in CONDITIONS:
        raise ProtocolError(f"hold: condition is {held.condition!r}: expected one of {', '.join(CONDITIONS)}; {MEND}")
    return held


def parse_opened(result: bytes, elements: int) -> Opened:
    """The result of open for a shard of so many elements."""
    document = parse_document(result, Kind.OPEN)
    if document.get("schema") != "plimsoll.session/1":
        raise ProtocolError(f"open: schema is {document.get('schema')!r}: expected 'plimsoll.session/1'; {MEND}")
    arenas = _arenas(document)
    for arena in arenas:
        size = TYPES.get(arena.type)
        if size is None:
            raise ProtocolError(
                f"open: arena {arena.name} has elements of {arena.type!r}: expected one of {', '.join(TYPES)}; {MEND}"
            )
        if arena.bytes != elements * size or arena.mapped_bytes < arena.bytes:
            raise ProtocolError(
                f"open: arena {arena.name} has {arena.bytes} bytes, {arena.mapped_bytes} of them mapped: "
                f"expected {elements * size}, for {elements} elements of {arena.type}; {MEND}"
            )
    opened = Opened(
        attached=_member(document, "attached", bool),
        initialized=_member(document, "initialized", bool),
        step=_member(document, "step", int),
        can_go_back=_member(document, "can_go_back", bool),
        retracts=_member(document, "retracts", bool),
        prepared_step=_member(document, "prepared_step", int),
        asked_step=_member(document, "asked_step", int),
        asked_factor=_asked_factor(document),
        arriving_step=_member(document, "arriving_step", int),
        torn_step=_member(document, "torn_step", int),
        accumulated=_member(document, "accumulated", int),
        accumulating=_member(document, "accumulating", int),
        cleared_step=_member(document, "cleared_step", int),
        elements=_member(document, "elements", int),
        service=_member(document, "service", str),
        kernel=_member(document, "kernel", str),
        arenas=arenas,
    )
    if opened.elements != elements:
        raise ProtocolError(f"open: the session has {opened.elements} elements: expected {elements}; {MEND}")
    components = sorted(a.component for a in arenas)
    if components not in (["gradients", "parameters"], ["gradients", "master_weights"]):
        raise ProtocolError(
            f"open: the arenas are {', '.join(components) or 'none'}: expected parameters (or master_weights) and gradients; {MEND}"
        )
    return opened
