"""What torch.cuda says of the memory of each GPU in a phase."""

from typing import Any, Dict, List

import torch

from plimsoll.torch.storages import Tally


def read(tally: Tally) -> List[Dict[str, Any]]:
    """The GPUs that this process uses. Their peaks begin anew."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    return [_of(device, tally) for device in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(device)]


def _of(device: int, tally: Tally) -> Dict[str, Any]:
    counters = torch.cuda.memory_stats_as_nested_dict(device)
    torch.cuda.reset_peak_memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = counters["allocated_bytes"]["all"], counters["reserved_bytes"]["all"]
    return {
        "device": device,
        "allocated_bytes": allocated["current"],
        "reserved_bytes": reserved["current"],
        "peak_allocated_bytes": allocated["peak"],
        "peak_reserved_bytes": reserved["peak"],
        "total_bytes": total,
        "free_bytes": free,
        "alloc_retries": counters["num_alloc_retries"],
        "holdings": tally.holdings(torch.device("cuda", device)),
    }
