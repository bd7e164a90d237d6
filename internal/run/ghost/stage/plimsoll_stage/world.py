"""One rank in a world of many: the others have the values of this one, and nobody waits for them."""

import os
import sys
from typing import Any, Dict

from plimsoll_stage import mailbox


def install(dist: Any, settings: Dict[str, Any], recorder: Any) -> None:
    """Replaces what would wait for other processes."""
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    store_of = _store_of(dist)
    begin, divide, split = c10d.init_process_group, c10d.new_group, getattr(c10d, "split_group", None)

    def backend_of(asked: Any) -> str:
        return "cpu:fake,cuda:nccl" if asked is None else str(asked).replace("gloo", "fake")

    def init_process_group(
        backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None, group_name="", pg_options=None,
        device_id=None, **options,
    ):  # fmt: skip
        import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

        size = int(os.environ.get("WORLD_SIZE", "1")) if world_size < 0 else world_size
        rank = int(os.environ.get("RANK", "0")) if rank < 0 else rank
        recorder.result["ranks"], recorder.result["rank"] = size, rank
        store = store_of()
        recorder.keep(store)  # torch keeps the part of it that is C++
        begin(
            backend=backend_of(backend), store=store, rank=rank, world_size=size, group_name=group_name,
            pg_options=pg_options,
        )  # fmt: skip
        # A group whose device is known would split its communicator off this one, by colors of which NCCL alone knows
        # how many ranks have the same.
        c10d._get_default_group().bound_device_id = None

    def tell_size(ranks: Any) -> None:
        """Tells the library how many ranks the next communicator has that is split from another: NCCL counts them."""
        own = dist.get_rank()
        if ranks is not None and own in ranks:
            recorder.library.plimsoll_ghost_splits(len(ranks), list(ranks).index(own))

    def new_group(ranks=None, timeout=None, backend=None, *arguments, **options):
        options.pop("device_id", None)
        return divide(ranks, timeout, None if backend is None else backend_of(backend), *arguments, **options)

    def split_group(parent_pg=None, split_ranks=None, *arguments, **options):
        parent = list(range(dist.get_world_size())) if parent_pg is None else dist.get_process_group_ranks(parent_pg)
        for ranks in split_ranks or ():
            tell_size([parent[rank] for rank in ranks])
        return split(parent_pg, split_ranks, *arguments, **options)

    def gather_to_all(found, value, group=None):
        found[:] = [value] * len(found)

    def gather(value, found=None, dst=None, group=None, group_dst=None):
        if found is not None:
            found[:] = [value] * len(found)

    def scatter(found, values, *arguments, **options):
        found[0] = values[0] if values else None

    def nothing(*arguments, **options):
        return None

    replaced = {
        "init_process_group": init_process_group,
        "new_group": new_group,
        "all_gather_object": gather_to_all,
        "gather_object": gather,
        "scatter_object_list": scatter,
        "barrier": nothing,
        "monitored_barrier": nothing,
        **mailbox.install(dist, settings, recorder),
    }
    if split is not None:
        replaced["split_group"] = split_group
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("torch.distributed")]
    for name, function in replaced.items():
        really = getattr(c10d, name, None)
        for module in modules:  # those that have imported it by name, too
            if really is not None and module.__dict__.get(name) is really:
                setattr(module, name, function)
    c10d._store_based_barrier = nothing
    dist.ProcessGroup.monitored_barrier = nothing
    for name in ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        os.environ.setdefault(name, "0")


def agree(utils: Any) -> None:
    """Ranks of DeepSpeed compare their lists with what rank 0 sends, which nobody is here."""
    utils.get_lst_from_rank0 = list
    utils.assert_lst_len_same_as_other_ranks = lambda found: None


def _store_of(dist: Any) -> Any:
    """A store in which every other rank has written what this one waits for: the identity of a communicator of NCCL."""

    class Store(dist.Store):
        def __init__(self):
            super().__init__()
            self._values: Dict[str, bytes] = {}

        def set(self, key, value):
            self._values[key] = value if isinstance(value, bytes) else str(value).encode()

        def get(self, key):
            return self._values.get(key, b"\7" * 128)  # as plimsoll's ncclGetUniqueId has it

        def add(self, key, amount):
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            return total

        def compare_set(self, key, expected, desired):
            return self._values.setdefault(key, desired.encode() if isinstance(desired, str) else desired)

        def delete_key(self, key):
            return self._values.pop(key, None) is not None

        def num_keys(self):
            return len(self._values)

        def check(self, keys):
            return True

        def wait(self, keys, timeout=None):
            return None

    return Store
