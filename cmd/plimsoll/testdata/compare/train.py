"""Trains a small model on the CPU, with a leak that the first argument names, and sends marks of its phases."""
import json, mmap, os, socket, sys, time
import torch

leak, steps = sys.argv[1], 24
marks = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
place, step = None, 0


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def mark(phase):
    global place
    iteration = {} if phase == "initialize" else {"iteration": "first" if step <= 1 else "steady"}
    ended = {}
    if place is not None:
        held = [{"component": "gradients", "bytes": sum(4 * p.numel() for p in model.parameters())},
                {"component": "optimizer_states", "bytes": sum(8 * p.numel() for p in model.parameters())}]
        ended = {"ended": {**place, "resident_bytes": resident(), "peak_resident_bytes": resident(),
                           "free_heap_bytes": -1, "holdings": held}}
    place = {"phase": phase, "step": step, **iteration}
    marks.sendto(json.dumps({"rank": 0, **place, **ended}).encode(), os.environ["PLIMSOLL_MARKS"])


class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        kept = []
        for i in range(10**6):
            if leak == "loader":
                kept.append(torch.ones(2**20))  # 4 MiB an item
            yield torch.ones(512)


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(4)])  # 4 MiB of parameters
    mark("initialize")
    optimizer = torch.optim.AdamW(model.parameters())
    batches = iter(torch.utils.data.DataLoader(Numbers(), num_workers=int(leak == "loader")))
    kept = []
    file = os.memfd_create("cache")
    os.ftruncate(file, 2**30)
    grown = mmap.mmap(file, 2**30)
    for step in range(1, steps + 1):
        mark("forward")
        loss = model(next(batches)).square().sum()
        time.sleep(0.12)
        mark("backward")
        loss.backward()
        if leak == "gradients":
            kept.append([p.grad for p in model.parameters()])
        if leak == "mapping":
            grown[(step - 1) << 22:step << 22] = b"x" * 2**22
        time.sleep(0.12)
        mark("step")
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.12)
