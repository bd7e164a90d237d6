"""What FSDP2 allocates for a parameter: its shard, and what a rank gathers.

No process group is joined: torch's fake backend stands for the other ranks. Prints one JSON
document with elements, for a parameter of --rows x 32 that is divided among --ranks. With --experts
it has so many matrices, whose rows are divided, as torchtitan's shard_placement_fn says.
"""

import argparse
import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """The elements of what is allocated."""

    def __init__(self):
        super().__init__()
        self.elements = []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        made = operation(*arguments, **(options or {}))
        if isinstance(made, torch.Tensor) and "empty" in str(operation):
            self.elements.append(made.numel())
        return made


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--experts", type=int, default=0)
    a = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=a.ranks)
    module = torch.nn.Module()
    matrices = (a.experts,) if a.experts else ()
    module.weight = torch.nn.Parameter(torch.empty(*matrices, a.rows, 32))
    rows = (lambda parameter: Shard(1)) if a.experts else None
    fully_shard(module, mesh=init_device_mesh("cpu", (a.ranks,)), shard_placement_fn=rows)
    shard = module.weight.to_local().untyped_storage().nbytes() // module.weight.element_size()
    with Allocations() as allocations:
        module.unshard()
    print(json.dumps({"shard": shard, "gathered": max(allocations.elements)}))


if __name__ == "__main__":
    main()
