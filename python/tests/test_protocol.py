"""Messages: what is packed, and that nothing but what is expected is taken."""

import json
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll import PlimsollError, ProtocolError, ServiceError, protocol
from plimsoll.protocol import Kind

OPENED = {
    "schema": "plimsoll.session/1",
    "attached": False,
    "step": 0,
    "prepared_step": 0,
    "asked_step": 0,
    "asked_factor": 0.5,
    "arriving_step": 0,
    "torn_step": 0,
    "can_go_back": False, "retracts": False,
    "accumulated": 0,
    "accumulating": 0,
    "cleared_step": 0,
    "initialized": False,
    "elements": 100,
    "service": "v0.1.0",
    "kernel": "avx2",
    "arenas": [
        {"name": "rank0/bf16/parameters", "component": "parameters", "type": "bf16", "bytes": 200, "mapped_bytes": 4096},
        {"name": "rank0/bf16/gradients", "component": "gradients", "type": "bf16", "bytes": 200, "mapped_bytes": 4096},
    ],
}


def answer(kind, number, body=b"", status=0):
    content = struct.pack("<I", status) + body
    return protocol.HEADER.pack(protocol.MAGIC, 2, kind | protocol.ANSWER, number, len(content)) + content


def test_requests_are_as_documented():
    assert protocol.pack(Kind.READY, 7, protocol.pack_range(3, 5)) == struct.pack("<IHHIIQQ", 0x4D494C50, 2, 6, 7, 16, 3, 5)
    step = protocol.pack_step(300, 0.5, True, [(1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11, 12, 13, 14)])
    assert step == struct.pack("<QdII14d", 300, 0.5, 1, 2, *range(1, 15))
    assert protocol.pack_step(1, 0.5, False, [], True) == struct.pack("<QdII", 1, 0.5, 4, 0)
    assert protocol.pack_arrived(3, 5, 7) == struct.pack("<QQQ", 3, 5, 7)
    assert protocol.pack_transfer(2, 10, 20, 64) == struct.pack("<IIQQQ", 2, 0, 10, 20, 64)
    assert protocol.pack_accumulate(3, 10, 20, 64) == struct.pack("<IIQQQQ", 2, 0, 10, 20, 64, 3)
    assert list(protocol.pack_order([(3, 5), (1, 2)])) == [struct.pack("<IIQQQQ", 1, 2, 3, 5, 1, 2)]
    assert list(protocol.pack_order([])) == [struct.pack("<II", 1, 0)]
    assert [p[:8] for p in protocol.pack_order([(0, 1)] * 4001)] == [struct.pack("<II", 1, 4000), struct.pack("<II", 0, 1)]
    with pytest.raises(ValueError, match="a message has at most 65520"):
        protocol.pack(Kind.SAVE, 1, bytes(70000))
    with pytest.raises(ValueError):
        protocol.pack_document({"lr": float("nan")})


def test_answers():
    assert protocol.parse_answer(answer(Kind.NORM, 3, struct.pack("<d", 1.5)), Kind.NORM, 3) == struct.pack("<d", 1.5)
    with pytest.raises(ServiceError, match="no room") as caught:
        protocol.parse_answer(answer(Kind.OPEN, 3, b"no room", 3), Kind.OPEN, 3)
    assert caught.value.status == "does_not_fit"
    good = answer(Kind.STEP, 3, bytes(16))
    for at, what in (
        (0, "begins with"),
        (4, "is of version"),
        (6, "is of kind"),
        (8, "has the number"),
        (12, "says how many bytes"),
    ):
        bad = bytearray(good)
        bad[at] ^= 1
        with pytest.raises(ProtocolError, match=f"step: an answer {what} .*install a client and a service of one release"):
            protocol.parse_answer(bytes(bad), Kind.STEP, 3)
    with pytest.raises(ProtocolError, match="status 9"):
        protocol.parse_answer(answer(Kind.STEP, 3, b"", 9), Kind.STEP, 3)


@given(st.binary(max_size=200), st.sampled_from(list(Kind)), st.integers(0, 2**32 - 1))
def test_random_packets_are_refused(packet, kind, number):
    with pytest.raises(ProtocolError):
        protocol.parse_answer(packet, kind, number)


@given(st.data())
def test_damaged_packets_are_refused_or_read(data):
    packet = bytearray(answer(Kind.STEP, 3, struct.pack("<Qd", 7, 0.25)))
    for _ in range(data.draw(st.integers(0, 3))):
        packet[data.draw(st.integers(0, len(packet) - 1))] = data.draw(st.integers(0, 255))
    packet = packet[: data.draw(st.integers(0, len(packet)))]
    try:
        protocol.parse_stepped(protocol.parse_answer(bytes(packet), Kind.STEP, 3), Kind.STEP)
    except PlimsollError:
        pass


def test_opened():
    opened = protocol.parse_opened(json.dumps(OPENED).encode(), 100)
    assert opened.arenas[1].name == "rank0/bf16/gradients" and opened.kernel == "avx2"
    with pytest.raises(ProtocolError, match="has 100 elements: expected 101|expected 202, for 101 elements"):
        protocol.parse_opened(json.dumps(OPENED).encode(), 101)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.just([[]]),
)


COUNTS = ("prepared_step", "asked_step", "arriving_step", "torn_step", "accumulated", "accumulating", "cleared_step")


@given(st.data())
@settings(max_examples=300)
def test_changed_documents_are_refused(data):
    document = json.loads(json.dumps(OPENED))
    where = data.draw(st.sampled_from([document, *document["arenas"]]))
    name = data.draw(st.sampled_from(sorted(where)))
    value = data.draw(VALUES)
    unchanged = type(value) is type(where[name]) and (
        value == where[name] or name in ("step", "attached", "initialized", "can_go_back", "service", "kernel", "name")
    )
    # A larger mapping is as good.
    unchanged = unchanged and not (name == "step" and not 0 <= value < 2**63)
    unchanged = unchanged or (name in COUNTS and type(value) is int and 0 <= value < 2**63)
    unchanged = unchanged or (name == "asked_factor" and type(value) in (int, float) and math.isfinite(value))
    unchanged = unchanged or (name == "mapped_bytes" and type(value) is int and 200 <= value < 2**63)
    where[name] = value
    text = json.dumps(document).encode()
    if unchanged:
        protocol.parse_opened(text, 100)
        return
    with pytest.raises(ProtocolError, match="(?s)open: .*install a client and a service of one release"):
        protocol.parse_opened(text, 100)


@given(st.binary(max_size=100))
def test_random_documents_are_refused(text):
    with pytest.raises(ProtocolError):
        protocol.parse_opened(text, 100)
    try:
        protocol.parse_loaded(text)
    except ProtocolError:
        pass
