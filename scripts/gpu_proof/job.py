"""A training of one job, measured phase by phase: python -m gpu_proof.job --job NAME --batch N. It prints JSON lines.

It is a plain loop around a model of transformers, with PEFT for LoRA. ``plimsoll plan`` runs the same program on the
ghost. Its phases are those of the plan: load, and forward, backward and step of the first and of later iterations.
"""

import argparse
import contextlib
import json
import subprocess
import time
from typing import Any, Callable, Dict, Iterator, Optional

import torch

from gpu_proof import jobs, models

Say = Callable[[Dict[str, Any]], None]


class Card:
    """The memory of the device, as torch counts it. Without CUDA all counts are 0."""

    def __init__(self) -> None:
        self.name = "cuda" if torch.cuda.is_available() else "cpu"
        self._is_cuda = self.name == "cuda"

    def synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def begin(self) -> None:
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def counts(self) -> Dict[str, int]:
        if not self._is_cuda:
            return dict.fromkeys(("peak_allocated", "end_allocated", "peak_reserved", "end_reserved"), 0)
        return {
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "end_allocated": torch.cuda.memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
            "end_reserved": torch.cuda.memory_reserved(),
        }

    def outside(self) -> Optional[int]:
        """What the device has in use beyond what torch has reserved."""
        if not self._is_cuda:
            return None
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()


def used_by_nvidia_smi() -> Optional[int]:
    """Bytes of the card in use, by nvidia-smi: None where there is none, as on the ghost."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) << 20
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return None


def host_bytes() -> Dict[str, int]:
    """Resident memory of this process by kind, and the most that it ever was."""
    names = {"VmHWM": "peak", "RssAnon": "anonymous", "RssFile": "file", "RssShmem": "shared"}
    with open("/proc/self/status") as status:
        rows = dict(line.split(":", 1) for line in status if ":" in line)
    return {name: int(rows[key].split()[0]) << 10 for key, name in names.items() if key in rows}


class Phases:
    """Says what each phase has held."""

    def __init__(self, card: Card, say: Say):
        self._card, self._say = card, say

    @contextlib.contextmanager
    def phase(self, name: str, iteration: str = "") -> Iterator[None]:
        self._card.begin()
        yield
        self._card.synchronize()
        self._say({"phase": name, "iteration": iteration, **self._card.counts()})


def adapted(model: torch.nn.Module, rank: int) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, task_type="CAUSAL_LM"))


def optimizer_of(model: torch.nn.Module, job: jobs.Job) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if job.optimizer == "adafactor":
        from transformers import Adafactor

        return Adafactor(trained, lr=1e-4, scale_parameter=False, relative_step=False)
    return torch.optim.AdamW(trained, lr=1e-4, **{job.optimizer.split("/")[1]: True})


def fused_loss(model: torch.nn.Module, inputs: Dict[str, torch.Tensor], chunk: int = 1024) -> torch.Tensor:
    """The loss of a few tokens at a time, whose logits are made again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    hidden = model.get_decoder()(input_ids=inputs["input_ids"]).last_hidden_state[:, :-1].flatten(0, 1)
    labels = inputs["labels"][:, 1:].flatten()
    head = model.get_output_embeddings()

    def part(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(head(rows).float(), targets, reduction="sum")

    pieces = zip(hidden.split(chunk), labels.split(chunk))
    return sum(checkpoint(part, *piece, use_reentrant=False) for piece in pieces) / len(labels)


def build(job: jobs.Job, card: Card, tiny: bool) -> torch.nn.Module:
    dtype = torch.bfloat16 if job.precision == "bf16" else torch.float32
    with torch.device(card.name):
        model = models.make(job.model, tiny, dtype, job.options.get("attention", "sdpa"))
    model.train()
    if job.options.get("lora"):
        model = adapted(model, job.options["lora"])
    if job.options.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if job.options.get("lora"):
            model.enable_input_require_grads()
    return model


class Training:
    """One training, step by step."""

    def __init__(self, job: jobs.Job, batch: int, tiny: bool, say: Say):
        self.card = Card()
        self._job, self._tiny, self._phases = job, tiny, Phases(self.card, say)
        with self._phases.phase("load"):
            self._model = build(job, self.card, tiny)
            self._optimizer = optimizer_of(self._model, job)
        length = min(job.length, 16) if tiny else job.length
        self._inputs = models.batch_of(self._model.config, batch, length, self.card.name)
        self._loss = self._loss_of()

    def _loss_of(self) -> Callable[[], torch.Tensor]:
        called = self._model
        if self._job.options.get(
            "compile"
        ):  # kernels for a CPU take a compiler of C++ a minute: the ghost makes the GPU's
            called = torch.compile(called, backend="aot_eager" if self._tiny else "inductor")
        if self._job.options.get("fused-loss"):
            return lambda: fused_loss(self._model, self._inputs)
        return lambda: called(**self._inputs).loss

    def _forward(self) -> torch.Tensor:
        if self._job.precision == "bf16":
            return self._loss()
        with torch.autocast(self.card.name, torch.bfloat16):
            return self._loss()

    def _update(self) -> None:
        if self._job.options.get("clip"):
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._job.options["clip"])
        self._optimizer.step()
        self._optimizer.zero_grad()

    def measured(self, iteration: str) -> None:
        with self._phases.phase("forward", iteration):
            loss = self._forward()
        with self._phases.phase("backward", iteration):
            loss.backward()
            del loss
        with self._phases.phase("step", iteration):
            self._update()

    def timed(self, steps: int) -> float:
        self.card.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self._forward().backward()
            self._update()
        self.card.synchronize()
        return (time.perf_counter() - began) / steps

    def recorded(self, seconds: float) -> int:
        """Steps with marks, for a recording: plimsoll.torch.watch tells it of phases. How many steps were made."""
        import plimsoll.torch

        plimsoll.torch.watch(self._model, self._optimizer)
        began, steps = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            self.timed(1)
            steps += 1
        return steps


def train(job: jobs.Job, batch: int, tiny: bool, seconds: float, say: Say) -> None:
    before = used_by_nvidia_smi()
    training = Training(job, batch, tiny, say)
    if seconds:
        say({"steps": training.recorded(seconds)})
        return
    for iteration in ("first", "steady", "later"):
        training.measured(iteration)
    say({"step_seconds": training.timed(2 if tiny else 5)})
    say(
        {
            "used_before": before,
            "used": used_by_nvidia_smi(),
            "outside": training.card.outside(),
            "host": host_bytes(),
        }
    )


def keep_snapshot(path: str) -> None:
    """Writes PyTorch's memory snapshot where an allocation fails."""
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")

    def observe(*_: Any) -> None:
        torch.cuda.memory._dump_snapshot(path)

    torch._C._cuda_attach_out_of_memory_observer(observe)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--snapshot")
    given = parser.parse_args()
    if given.snapshot:
        keep_snapshot(given.snapshot)
    job = jobs.BY_NAME[given.job]
    train(job, given.batch, given.tiny, given.seconds, lambda line: print(json.dumps(line), flush=True))


if __name__ == "__main__":
    main()
