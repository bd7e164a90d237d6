"""The state of sessions, from and to entries of torch's state_dict."""

from typing import Any, Dict, Iterable, Optional, Sequence

import numpy as np
import torch

from plimsoll import protocol
from plimsoll.torch.algorithm import Algorithm
from plimsoll.torch.layout import DTYPES, DTensor, is_sharded, local
from plimsoll.torch.shard import Shard
from plimsoll.torch.slot import Slot

_STREAMS = (protocol.FIRST_MOMENT, protocol.SECOND_MOMENT)
_MASTER = "master_weights"


def read_entries(shards: Iterable[Shard], algorithm: Algorithm) -> Dict[torch.Tensor, Dict[str, Any]]:
    """The entries of all parameters: fp32 tensors of their shapes on the CPU."""
    entries = {}
    for shard in shards:
        own_steps = shard.session.own_steps() if shard.session else []
        for (parameter, slot), own in zip(shard.slots.items(), own_steps):
            if own == 0 and shard.name == "fp32" and not algorithm.has_state_at_once:
                continue  # torch makes it with the first gradient
            entry = read_entry(shard, slot, algorithm, own)
            if shard.name != "fp32":
                entry[_MASTER] = _read(shard, slot, protocol.MASTER_WEIGHTS)
            entries[parameter] = entry
    return entries


def read_entry(shard: Shard, slot: Slot, algorithm: Algorithm, own: Optional[int] = None) -> Dict[str, Any]:
    """The state of a parameter that has had so many steps of its ``own``, as torch's optimizer has it."""
    if own is None:
        own = next(own for other, own in zip(shard.slots.values(), shard.session.own_steps()) if other is slot)
    entry: Dict[str, Any] = {}
    if algorithm.counts_steps:
        entry["step"] = torch.tensor(float(own))
    for name, stream in zip(algorithm.moments, _STREAMS):
        is_over = own > 0 or name != "momentum_buffer"  # which shows torch's SGD that its first step is over
        entry[name] = _read(shard, slot, stream) if is_over else None
    return entry


def _read(shard: Shard, slot: Slot, stream: int) -> torch.Tensor:
    values = torch.from_numpy(shard.session.read(stream, slot.piece.offset, slot.piece.count))
    return _shaped(values, slot.piece.parameter)


def _shaped(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    values = values.view(local(parameter).shape)
    if is_sharded(parameter):
        return DTensor.from_local(
            values,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return values


_Entries = Dict[torch.Tensor, Optional[Dict[str, Any]]]


def check_entries(shards: Iterable[Shard], algorithm: Algorithm, entries: _Entries) -> int:
    """The step of entries. Raises ValueError for entries that :func:`write_entries` cannot write."""
    step = max((own_step(entry, algorithm) for entry in entries.values()), default=0)
    for shard in shards:
        for parameter, slot in shard.slots.items():
            entry = entries.get(parameter)
            if not entry:
                continue
            missing = [name for name in (*algorithm.moments, *["step"] * algorithm.counts_steps) if name not in entry]
            if missing:
                raise ValueError(
                    f"the state of parameter {slot.piece.name} has {', '.join(map(str, entry))}, but no "
                    f"{' or '.join(missing)}: it is of another optimizer"
                )
            for name in (*algorithm.moments, _MASTER):
                tensor = entry.get(name)
                if tensor is not None and tuple(tensor.shape) != slot.piece.shape:
                    raise ValueError(
                        f"{name} of parameter {slot.piece.name} has the shape {tuple(tensor.shape)}: expected {slot.piece.shape}"
                    )
    return step


def write_entries(shards: Iterable[Shard], algorithm: Algorithm, entries: _Entries) -> None:
    """Writes entries into the state, and initial values where there are none. The state is incomplete until
    ``set_step``.
    """
    for shard in shards:
        if shard.session is None:
            continue
        shard.session.set_own_steps([own_step(entries.get(parameter), algorithm) for parameter in shard.slots])
        for parameter, slot in shard.slots.items():
            entry = entries.get(parameter) or {}
            # The second moment before the first: with int8 moments it is the first moment's unit.
            for name, stream in reversed(list(zip(algorithm.moments, _STREAMS))):
                given = entry.get(name)
                begins = stream == protocol.FIRST_MOMENT and given is None
                shard.session.write(stream, slot.piece.offset, shard.first_moment(slot) if begins else _values(given, slot))
            master = entry.get(_MASTER)
            exact = master is not None and master.dtype == torch.float32
            masters = _values(master, slot) if exact else None
            weights = _weights(slot, [masters] if exact else [], shard.name)
            shard.session.write(protocol.MASTER_WEIGHTS, slot.piece.offset, weights)
            slot.loaded = master if exact and shard.name != "fp32" and not np.array_equal(weights, masters) else None


def take_weights(shards: Iterable[Shard]) -> None:
    """Brings weights that the program has changed in the model, as by its load_state_dict, into the state.

    If a checkpoint is being written, it waits for that.
    """
    for shard in shards:
        changed = shard.parameters.changed()
        for slot in changed:
            piece, masters = slot.piece, []
            if shard.parameters.knows_weights_before():
                masters.append(shard.session.read(protocol.MASTER_WEIGHTS, piece.offset, piece.count))
            if slot.loaded is not None:
                masters.append(_values(slot.loaded, slot))
            shard.session.write(protocol.MASTER_WEIGHTS, piece.offset, _weights(slot, masters, shard.name))
        if changed:
            shard.session.set_step(shard.session.step, keep_own=True)  # it is complete again
        shard.parameters.taken(changed)


def own_step(entry: Optional[Dict[str, Any]], algorithm: Algorithm) -> int:
    """How many steps a parameter has had: none without an entry, as torch makes it with the first gradient."""
    if not entry:
        return 0
    if algorithm.counts_steps:
        return int(entry.get("step", 0))
    # torch's SGD treats only its first step differently, and a momentum shows that the step is over.
    return int(any(value is not None for name, value in entry.items() if name != _MASTER))


def _values(tensor: Any, slot: Slot) -> np.ndarray:
    piece = slot.piece
    if tensor is None:
        return np.zeros(piece.count, np.float32)
    flat = local(tensor.detach()).reshape(-1)
    if not is_sharded(tensor):
        flat = flat[piece.first : piece.first + piece.count]
    return flat.to("cpu", torch.float32).numpy()


def _weights(slot: Slot, masters: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """The master weights of a piece: the model's weights, with the bits below them from ``masters`` that agree with
    them.

    If the program has loaded other weights into the model since, those count. Later masters have precedence over
    earlier ones.
    """
    piece = slot.piece
    flat = local(piece.parameter.detach()).reshape(-1)
    if not is_sharded(piece.parameter):
        flat = flat[piece.first : piece.first + piece.count]
    weights = found = flat.to("cpu", torch.float32).numpy()
    for held in masters if dtype != "fp32" else ():
        nearest = torch.from_numpy(held).to(DTYPES[dtype]).float().numpy()
        # Halfway between two numbers, the state may have either.
        halfway = np.isfinite(nearest) & (np.abs(held - weights) == np.abs(held - nearest))
        found = np.where((nearest == weights) | halfway, held, found)
    return found
