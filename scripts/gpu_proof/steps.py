"""What of a step a trainer waits for: engines beside torch's fused AdamW, and the law of ``plimsoll roads``."""

import contextlib
import functools
import json
import os
import pathlib
import subprocess
import time
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch

import plimsoll.torch
from gpu_proof import cards, device, models, results
from gpu_proof.results import LeftOut

BATCH, LENGTH = (1, 16) if device.DRY else (4, 1024)
WARM, STEPS = (1, 1) if device.DRY else (2, 5)
HOST_SHARE = 0.6  # of the host's memory, for the largest model
MOST_PARAMETERS = 3e9  # with more, to open and pin the arenas takes most of the run
BYTES = 24  # of the host for each parameter, with StateOffload


def _layers(host_bytes: int, card_bytes: int) -> int:
    """As many layers of the larger model as the host and the card hold, with 8 bytes a parameter on the card."""
    parameters = min(HOST_SHARE * host_bytes / BYTES, 0.5 * card_bytes / 8, MOST_PARAMETERS)
    embedding, layer = 151936 * 1536, 46.8e6
    return max(28, int((parameters - embedding) / layer))


def shape_of(size: str) -> Dict[str, Any]:
    machine = results.machine(results.read(pathlib.Path(os.environ["GPU_PROOF_RESULTS"]))) or {}
    return {
        "0.5B": lambda: {"model": "qwen"},
        "1.5B": lambda: {"model": "qwen-larger"},
        "largest": lambda: {
            "model": "qwen-larger",
            "num_hidden_layers": _layers(machine["host_bytes"], machine["card_bytes"]),
        },
    }[size]()


@functools.lru_cache(maxsize=1)
def model_of(size: str) -> torch.nn.Module:
    shape = shape_of(size)
    name, changes = shape.pop("model"), {} if device.DRY else shape
    if device.DRY:  # the stand-in device has no factories of transformers
        return models.make(name, True, torch.bfloat16, attention="eager").to(device.NAME)
    with torch.device(device.NAME):
        return models.make(name, False, torch.bfloat16, **changes)


class NoStep:
    """An optimizer that does nothing: what is left of a step are its passes."""

    def step(self) -> None:
        pass


def _torchao(parameters: List[torch.nn.Parameter]) -> Any:
    try:
        from torchao.optim import CPUOffloadOptimizer
    except ImportError:
        raise LeftOut("torchao is not here") from None
    return CPUOffloadOptimizer(parameters, torch.optim.AdamW, fused=True)


def _ours(model: torch.nn.Module, **options: Any) -> Any:
    return plimsoll.torch.AdamW(model.parameters(), lr=1e-4, model=model, **options)


def _offload(model: torch.nn.Module, mode: str) -> Any:
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return plimsoll.torch.StateOffload(inner, mode=mode, master="split")


ENGINES: Dict[str, Callable[[torch.nn.Module], Any]] = {
    "torch-fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True),
    "none": _ours,
    "forward": lambda m: _ours(m, overlap="forward"),
    "backward": lambda m: _ours(m, overlap="backward"),
    "async": lambda m: _ours(m, overlap=plimsoll.torch.Async(warm_up_steps=1)),
    "offload-chunked": lambda m: _offload(m, "chunked"),
    "offload-whole": lambda m: _offload(m, "whole"),
    "torchao": lambda m: _torchao(list(m.parameters())),
}


@contextlib.contextmanager
def opened(model: torch.nn.Module, engine: str) -> Iterator[Any]:
    optimizer = ENGINES[engine](model)
    try:
        yield optimizer
    finally:
        getattr(optimizer, "close", lambda: None)()


def seconds_of_step(model: torch.nn.Module, optimizer: Any) -> float:
    """A whole step, of which nothing is left to wait for at the end."""
    inputs = models.batch_of(model.config, BATCH, LENGTH, device.NAME)

    def steps(count: int) -> None:
        for _ in range(count):
            model(**inputs).loss.backward()
            optimizer.step()
            model.zero_grad() if isinstance(optimizer, NoStep) else optimizer.zero_grad()

    steps(WARM)
    device.synchronize()
    began = time.perf_counter()
    steps(STEPS)
    getattr(optimizer, "synchronize", lambda: None)()
    device.synchronize()
    return (time.perf_counter() - began) / STEPS


@functools.lru_cache(maxsize=1)
def passes(size: str) -> float:
    return seconds_of_step(model_of(size), NoStep())


# The law

ROADS = {
    "torch-fused": "states on the GPU",
    "none": "CPU step",
    "forward": "CPU step, overlap forward",
    "offload-chunked": "states in chunks",
    "offload-whole": "states whole",
}


def rates() -> Dict[str, float]:
    """What this machine moves: the largest copies of registered memory, and updates by the service."""
    lines = results.read(pathlib.Path(os.environ["GPU_PROOF_RESULTS"]))
    copies, host = results.found(lines, "rates/copies"), results.found(lines, "rates/host")
    if not copies or not host:
        return {}
    row = [row for row in copies["rows"] if row["memory"] == "registered"][-1]
    named = {"--link-in": "to_device", "--link-out": "to_host", "--link-both": "both_added"}
    measured = {flag: row[key] / 1e9 for flag, key in named.items()}
    return {**measured, "--host-bandwidth": host["update_bytes_per_second"] / 1e9}


@functools.lru_cache(maxsize=1)
def law(size: str, measured_passes: float) -> Dict[str, float]:
    """The exposed seconds of each road, with the measured rates and passes as long as those measured."""
    shape = shape_of(size)
    folder = models.folder_of(shape.pop("model"), **shape)
    measured = rates()
    if not measured:
        return {}

    def roads(tflops: float) -> Dict[str, Any]:
        flags = [word for flag, rate in measured.items() for word in (flag, f"{rate:.6g}")]
        command = [
            os.environ["PLIMSOLL"],
            "roads",
            "--model",
            folder,
            "--precision",
            "bf16",
            "--micro-batch",
            str(BATCH),
            "--seq-len",
            str(LENGTH),
            "--master",
            "split",
            "--optimizer",
            "adamw/fused",
            "--tflops",
            f"{tflops:.6g}",
            *flags,
            *cards.flags(),
            "--json",
        ]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)

    assumed = roads(100)["rates"]
    tflops = 100 * (assumed["forward_seconds"] + assumed["backward_seconds"]) / measured_passes
    return {road["name"]: road["times"]["exposed_seconds"] for road in roads(tflops)["roads"] if road.get("times")}


def exposed_by_law(size: str, engine: str, measured_passes: float) -> Optional[float]:
    return law(size, measured_passes).get(ROADS.get(engine, ""))


def run(size: str, engine: str) -> Dict[str, Any]:
    model = model_of(size)
    alone = passes(size)
    began = time.perf_counter()
    with opened(model, engine) as optimizer:
        step = seconds_of_step(model, optimizer)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": BATCH * LENGTH,
        "passes_seconds": alone,
        "step_seconds": step,
        "exposed_seconds": step - alone,
        "law_seconds": exposed_by_law(size, engine, alone),
        "whole_seconds": time.perf_counter() - began,
    }
