"""The parts of the proof, the most important ones first, each with its limit in seconds."""

from dataclasses import dataclass
from typing import List

from gpu_proof import jobs

CARD, HOST = "card", "host"  # lanes: parts of the host run beside those of the card


@dataclass(frozen=True)
class Part:
    """``name`` is the worker's, a slash, and the case. Quiet parts measure times, and wait for the host's lane."""

    name: str
    seconds: float
    lane: str = CARD
    quiet: bool = False

    @property
    def worker(self) -> str:
        return self.name.split("/")[0]


FORMATS = (
    [("bf16", state, moments) for state in ("split", "fp32", "split24") for moments in ("fp32", "bf16", "int8")]
    + [("fp32", "split", moments) for moments in ("fp32", "bf16", "int8")]
    + [("fp16", "fp32", "fp32")]
)

WAYS = ["zero1", "overlap-forward", "overlap-backward", "overlap-async", "gradients-step", "clipped", "missing"]
OPTIMIZERS = ["adam", "adagrad", "sgd", "lion"]
WRAPPED = ["fused", "foreach", "muon"]
MODES = ["chunked", "whole"]
TROUBLE = ["capture", "out-of-memory", "service-killed", "trainer-killed", "trainer-killed-offload"]

SIZES = ["0.5B", "1.5B", "largest"]
ENGINES = ["torch-fused", "none", "forward", "backward", "async", "offload-chunked", "offload-whole", "torchao"]


def _correctness() -> List[Part]:
    names = ["adamw/" + "-".join(f) for f in FORMATS]
    names += ["adamw/" + way for way in WAYS]
    names += ["optimizer/" + name for name in OPTIMIZERS]
    names += [f"offload/{name}-{mode}" for name in WRAPPED for mode in MODES]
    names += ["offload/masters-split", "muon/fp32", "muon/bf16", "losses/adamw"]
    names += ["trouble/" + name for name in TROUBLE]
    return [Part("correctness/" + name, 60) for name in names]


def _steps(sizes: List[str], seconds: float) -> List[Part]:
    return [Part(f"steps/{size}/{engine}", seconds, quiet=True) for size in sizes for engine in ENGINES]


def all_parts() -> List[Part]:
    """In the order in which they run, but for the host's lane, which begins with the first one."""
    return [
        *[Part("plans/" + job.name, 150, HOST) for job in jobs.JOBS],
        *_correctness(),
        Part("rates/host", 40, quiet=True),
        Part("rates/copies", 40, quiet=True),
        Part("rates/registration", 30, quiet=True),
        *_steps(SIZES[:1], 60),
        *[Part("truth/" + job.name, 90) for job in jobs.JOBS],
        Part("diagnosis/topology", 10),
        Part("diagnosis/out-of-memory", 90),
        Part("diagnosis/recording", 120),
        Part("sanitizer/memcheck", 90),
        *_steps(SIZES[1:], 90),
    ]


def dry_parts() -> List[Part]:
    """Those of a dry run, which also asks whether the functions of CUDA are there."""
    return [*all_parts(), Part("ghosted/cuda", 150)]
