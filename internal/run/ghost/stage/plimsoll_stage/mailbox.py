"""What ranks that are played send each other: small tensors of integers, and so the objects that are made of them.

A rank that is not played sends nothing. So a rank says what it waits for, and the one that has started it plays the
sender, too, once nobody who is played could send it. A group of ranks is known by the distances between them: what the
first of one group sends to the second, the first of each group like it would send to the second of its own.
"""

import builtins
import functools
import hashlib
import json
import os
import pickle
import sys
import time
from typing import Any, Callable, Dict, List, Optional

from plimsoll_stage import Refused, values

MOST = 1 << 20  # bytes of a message: copies of the device are made up to there
_open, _replace, _remove = builtins.open, os.replace, os.remove  # the folder is not the program's


class Mailbox:
    """A folder with a file for each message."""

    def __init__(self, settings: Dict[str, Any]):
        self._settings = settings.get("mailbox")
        self._sent: Dict[Any, int] = {}
        self._own: Dict[Any, bytes] = {}  # the last message of this rank, by the group and how far it went

    @property
    def is_open(self) -> bool:
        return self._settings is not None

    def send(self, ranks: List[int], source: int, to: Optional[int], text: bytes) -> None:
        """Sends a message to a rank of a group, or to all."""
        path = self.path(ranks, source, to)
        with _open(f"{path}.{self._settings['name']}", "wb") as file:
            file.write(text)
        _replace(file.name, path)
        if to is not None:
            self._own[tuple(ranks), (to - source) % len(ranks)] = text

    def own(self, ranks: List[int], source: int, to: int) -> Optional[bytes]:
        """What this rank has sent as far as it receives from another: ranks in a ring send what they are sent."""
        return self._own.get((tuple(ranks), (to - source) % len(ranks)))

    def receive(self, path: str, source: int, is_needed: bool) -> Any:
        """Waits for a message of a rank. Returns it, or why nobody sends it."""
        waits = os.path.join(self._settings["folder"], self._settings["name"] + ".waits")
        text, why = _read(path), None
        if text is None:
            want = {"rank": source, "message": os.path.basename(path), "needed": is_needed}
            with _open(waits + ".part", "w") as file:
                json.dump(want, file)
            _replace(waits + ".part", waits)
            while text is None and why is None:
                time.sleep(0.01)
                text, why = _read(path), _read(path + ".none")
            _remove(waits)
        return (text, None) if text is not None else (None, why.decode(errors="replace"))

    def path(self, ranks: List[int], source: int, to: Optional[int]) -> str:
        """The file of the next message of a rank to another of its group, or to all."""
        way = (tuple(rank - ranks[0] for rank in ranks), source, to)
        number = self._sent[way] = self._sent.get(way, 0) + 1
        return os.path.join(self._settings["folder"], hashlib.sha256(repr((way, number)).encode()).hexdigest()[:32])


def _read(path: str) -> Optional[bytes]:
    try:
        with _open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def install(dist: Any, settings: Dict[str, Any], recorder: Any) -> Dict[str, Any]:
    """Functions of torch.distributed that deliver what ranks send each other."""
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    torch, mailbox = sys.modules["torch"], Mailbox(settings)
    within: List[str] = []  # the function that is called: some call each other

    def members(group: Any) -> List[int]:
        return list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)

    def is_sent(x: Any) -> bool:
        if not mailbox.is_open or not isinstance(x, torch.Tensor) or x.is_floating_point() or x.is_complex():
            return False
        return type(x) in (torch.Tensor, torch.nn.Parameter) and 0 < x.numel() * x.element_size() <= MOST

    def here(x: Any) -> Any:
        return values.alias(torch, x) if x.device.type == "cuda" else x.detach()

    def send(x: Any, ranks: List[int], to: int) -> None:
        own = ranks.index(dist.get_rank())
        if is_sent(x) and to != own:
            mailbox.send(ranks, own, to, here(x).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    def receive(x: Any, ranks: List[int], source: int) -> None:
        expect(x, ranks, source)()

    def expect(x: Any, ranks: List[int], source: int) -> Callable[[], None]:
        """Takes the next message of a rank for a tensor. Returns what waits for it."""
        own = ranks.index(dist.get_rank())
        if not is_sent(x) or source == own:
            return lambda: None
        path = mailbox.path(ranks, source, own)
        return lambda: fill(x, ranks, source, path)

    def fill(x: Any, ranks: List[int], source: int, path: str) -> None:
        text, why = mailbox.receive(path, ranks[source], True)
        size = x.numel() * x.element_size()
        if text is None:
            text = mailbox.own(ranks, source, ranks.index(dist.get_rank()))
            if text is None or len(text) != size:
                raise Refused(_refusal(ranks[source], why))
            recorder.note("guesses", "integers that ranks send around: others send what this one does")
        if len(text) != size:
            raise Refused(f"rank {ranks[source]} sends {len(text)} bytes, and this one receives {size}")
        there = here(x)
        got = torch.frombuffer(bytearray(text), dtype=torch.uint8).view(x.dtype).view(x.shape)
        torch.Tensor.copy_.__wrapped__(there, got)

    def passing(name: str, act: Any, end: str) -> Any:
        really = getattr(c10d, name)

        @functools.wraps(really)
        def call(tensor, peer=None, group=None, *arguments, **options):
            peer = options.pop(end, peer)
            on = f"group_{end}"
            if within or peer is None and options.get(on) is None:
                return really(tensor, peer, group, *arguments, **options)
            within.append(name)
            try:
                work = really(tensor, peer, group, *arguments, **options)
            finally:
                within.pop()
            ranks = members(group)
            if dist.get_rank() not in ranks:
                return work
            other = options[on] if peer is None else ranks.index(peer)
            if name == "irecv" and is_sent(tensor):
                return _Receipt(work, expect(tensor, ranks, other))
            act(tensor, ranks, other)
            return work

        return call

    batch = c10d.batch_isend_irecv

    @functools.wraps(batch)
    def batch_isend_irecv(p2p_op_list):
        within.append("batch_isend_irecv")
        try:
            works = batch(p2p_op_list)
        finally:
            within.pop()
        for of, act in (("isend", send), ("irecv", receive)):  # sends first: each rank of a ring receives, too
            for op in p2p_op_list:
                if op.op is getattr(c10d, of):
                    ranks = members(op.group)
                    act(op.tensor, ranks, ranks.index(op.peer))
        return works

    receive_objects = c10d.recv_object_list

    @functools.wraps(receive_objects)
    def recv_object_list(object_list, src=None, *arguments, **options):
        if not mailbox.is_open:
            raise Refused(_refusal(src, "it was not played"))
        return receive_objects(object_list, src, *arguments, **options)

    def broadcast_object_list(object_list, src=None, group=None, device=None, group_src=None, **options):
        ranks = members(group)
        if not mailbox.is_open or len(ranks) < 2 or dist.get_rank() not in ranks:
            return
        source, own = ranks.index(src) if src is not None else group_src or 0, ranks.index(dist.get_rank())
        if source == own:
            try:
                text = pickle.dumps(list(object_list))
            except Exception:  # a real run fails with it
                return
            if len(text) <= MOST:
                mailbox.send(ranks, own, None, text)
            return
        text, _ = mailbox.receive(mailbox.path(ranks, source, None), ranks[source], False)
        if text is not None:
            object_list[:] = pickle.loads(text)
        else:
            recorder.note("values", "an object that another rank broadcasts was left as this one has it")

    return {
        "send": passing("send", send, "dst"), "isend": passing("isend", send, "dst"),
        "recv": passing("recv", receive, "src"), "irecv": passing("irecv", receive, "src"),
        "batch_isend_irecv": batch_isend_irecv, "recv_object_list": recv_object_list,
        "broadcast_object_list": broadcast_object_list,
    }  # fmt: skip


class _Receipt:
    """What a program waits for that has asked for a message."""

    def __init__(self, work: Any, receive: Callable[[], None]):
        self._work, self._receive = work, receive

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *arguments: Any, **options: Any) -> Any:
        receive, self._receive = self._receive, lambda: None
        receive()
        return self._work.wait(*arguments, **options)


def _refusal(rank: Any, why: Optional[str]) -> str:
    return (
        f"this rank waits for values that rank {rank} sends, such as the sizes of a pipeline's activations: {why}. "
        "Expected a program that states them"
    )
