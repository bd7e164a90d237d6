"""Measures the links of all GPUs: one line of JSON on stdout."""

import json
import sys

import torch

BYTES = 256 << 20
ROUNDS = 5


def rate(copies, device):
    """The bytes a second of copies that begin together, each on a stream of its own; the median of some rounds."""
    streams = [torch.cuda.Stream(device) for _ in copies]
    rates = []
    for _ in range(ROUNDS + 1):  # the first one warms up
        torch.cuda.synchronize(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for stream, (to, source) in zip(streams, copies):
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)
            (to if to.is_cuda else source).record_stream(stream)
        for stream in streams:
            torch.cuda.current_stream(device).wait_stream(stream)
        end.record()
        end.synchronize()
        rates.append(len(copies) * BYTES / (begin.elapsed_time(end) / 1e3))
    return sorted(rates[1:])[ROUNDS // 2]


def name(device):
    """The PCI address, as the kernel writes it, or the index where this torch does not know it."""
    found = torch.cuda.get_device_properties(device)
    parts = [getattr(found, part, None) for part in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if None in parts:
        return f"cuda:{device}"
    return "{:04x}:{:02x}:{:02x}.0".format(*parts)


def main():
    if not torch.cuda.is_available():
        print(json.dumps({"note": f"torch {torch.__version__} finds no CUDA", "links": []}))
        return
    links = []
    for device in range(torch.cuda.device_count()):
        with torch.cuda.device(device):
            up, down = (torch.empty(BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
            there, back = (torch.zeros(BYTES, dtype=torch.uint8, device=f"cuda:{device}") for _ in range(2))
            links.append({
                "gpu": name(device),
                "to_gpu_bytes_per_second": rate([(there, up)], device),
                "from_gpu_bytes_per_second": rate([(down, back)], device),
                "both_bytes_per_second": rate([(there, up), (down, back)], device),
            })
    print(json.dumps({"note": "", "links": links}))


sys.exit(main())
