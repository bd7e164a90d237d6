"""Correctness: gradients are copied to the host and parameters come back. Trainings are held to the CPU's bits."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import Any, Callable, Dict

import torch
import torch.distributed

import plimsoll.torch
from gpu_proof import device, mortal
from gpu_proof.given import Model, compared, values, weights
from plimsoll import PlimsollError, Service

STEPS = 5
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Found = Dict[str, Any]

torch.use_deterministic_algorithms(True, warn_only=True)


def trained(
    place: str,
    make: Callable[[Model], Any],
    dtype: torch.dtype = torch.bfloat16,
    missing: bool = False,
    state: bool = True,
) -> Dict:
    """The numbers of a training on a device, with those of its state unless ranks have it in parts."""
    model = Model(place, dtype)
    with contextlib.closing(make(model)) as optimizer:
        for step in range(STEPS):
            model(model.gradients(step), (1, 3) if missing and step == 2 else ()).backward()
            optimizer.step()
            optimizer.zero_grad()
        getattr(optimizer, "synchronize", lambda: None)()
        return values(model, optimizer) if state else weights(model)


def as_on_the_cpu(make: Callable[[Model], Any], **options: Any) -> Found:
    """The device's training beside the CPU's, which must have the same bits."""
    found = compared(trained(device.NAME, make, **options), trained("cpu", make, **options))
    return {**found, "steps": STEPS, "against": "the same run on the CPU", "holds": found["differing"] == 0}


def adamw(case: str) -> Found:
    way = WAYS.get(case)
    if way is not None:
        return way()
    dtype, state, moments = case.split("-")
    return as_on_the_cpu(
        lambda m: plimsoll.torch.AdamW(m.parameters(), lr=1e-2, state=state, moments=moments), dtype=DTYPES[dtype]
    )


def _with(state: bool = True, **options: Any) -> Callable[[], Found]:
    return lambda: as_on_the_cpu(
        lambda m: plimsoll.torch.AdamW(m.parameters(), lr=1e-2, model=m, **options), state=state
    )


def _zero1() -> Found:
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            with device.collectives():
                return _with(state=False, sharding="zero1", max_grad_norm=1.0)()
        finally:
            torch.distributed.destroy_process_group()


def _async() -> Found:
    return _with(overlap=plimsoll.torch.Async(warm_up_steps=2))()


WAYS: Dict[str, Callable[[], Found]] = {
    "zero1": _zero1,
    "overlap-forward": _with(overlap="forward", max_grad_norm=1.0),
    "overlap-backward": _with(overlap="backward"),
    "overlap-async": _async,
    "gradients-step": _with(gradients="step"),
    "clipped": _with(max_grad_norm=0.3),
    "missing": lambda: as_on_the_cpu(lambda m: plimsoll.torch.AdamW(m.parameters(), lr=1e-2), missing=True),
}


def optimizer(case: str) -> Found:
    make = {
        "adam": lambda m: plimsoll.torch.Adam(m.parameters(), lr=1e-2),
        "adagrad": lambda m: plimsoll.torch.Adagrad(m.parameters(), lr=1e-2),
        "sgd": lambda m: plimsoll.torch.SGD(m.parameters(), lr=0.1, momentum=0.9),
        "lion": lambda m: plimsoll.torch.Lion(m.parameters(), lr=1e-3),
    }[case]
    return as_on_the_cpu(make)


# Updates on the device


def matrices(model: Model) -> list:
    return [p for p in model.parameters() if p.ndim == 2]


INNER = {
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
    "muon": lambda m: torch.optim.Muon(matrices(m), lr=1e-2),
}
CHUNK_BYTES = 200_000


class Closable:
    """torch's optimizers have nothing to close."""

    def __init__(self, inner: Any):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def close(self) -> None:
        pass


def beside_torch(ours: Callable, theirs: Callable, bound: float = 0.0, dtype: torch.dtype = torch.float32) -> Found:
    """Two optimizers on the same device: the same bits, or, where operations differ, numbers within a bound."""
    found = compared(trained(device.NAME, ours, dtype), trained(device.NAME, lambda m: Closable(theirs(m)), dtype))
    holds = found["differing"] == 0 or found["largest_relative"] <= bound
    return {**found, "steps": STEPS, "against": "torch's optimizer on the same device", "holds": holds}


def offload(case: str) -> Found:
    if case == "masters-split":
        return _masters()
    name, mode = case.split("-")
    options = {"mode": mode, "chunk_bytes": CHUNK_BYTES}
    return beside_torch(lambda m: plimsoll.torch.StateOffload(INNER[name](m), **options), INNER[name])


def _masters() -> Found:
    """Masters are not torch's: the CPU is asked, whose fused update may differ in the last bit."""

    def make(model: Model) -> Any:
        return plimsoll.torch.StateOffload(INNER["fused"](model), chunk_bytes=CHUNK_BYTES, master="split")

    ours, theirs = trained(device.NAME, make), trained("cpu", make)
    masters = [{k: v for k, v in numbers.items() if k.endswith("master_weights")} for numbers in (ours, theirs)]
    found = compared(*masters)
    away = max(float((masters[0][k] - masters[1][k]).abs().max()) for k in masters[0])
    return {**found, "largest_absolute": away, "against": "the same run on the CPU", "holds": away <= 1e-5}


def muon(case: str) -> Found:
    def ours(model: Model) -> Any:
        others = [p for p in model.parameters() if p.ndim != 2]
        groups = [{"params": matrices(model)}, {"params": others, "use_muon": False}]
        return plimsoll.torch.Muon(groups, lr=1e-2, adamw={"lr": 1e-3}, chunk_bytes=CHUNK_BYTES)

    on_device, cpu = (trained(place, ours, DTYPES[case], state=False) for place in (device.NAME, "cpu"))
    found = compared(on_device, cpu)
    away = max(float((on_device[k].double() - cpu[k].double()).abs().max()) for k in cpu)
    # Products of bf16 matrices are added up in another order on a GPU: updates of 1e-2 differ in the second digit.
    return {**found, "largest_absolute": away, "against": "the same run on the CPU", "holds": away <= STEPS * 1e-3}


def losses(case: str) -> Found:
    """A small GPT on text, beside torch's AdamW on the same device."""
    import gpt

    def run(make: Callable) -> list:
        torch.manual_seed(0)
        model = gpt.GPT().to(device.NAME)
        optimizer = make(model)
        seen = []
        for step in range(20):
            loss = model.loss(gpt.batch(gpt.text(), step).to(device.NAME))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        getattr(optimizer, "close", lambda: None)()
        return seen

    ours = run(lambda m: plimsoll.torch.AdamW(m.parameters(), lr=1e-3, model=m))
    theirs = run(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3))
    away = max(abs(a - b) / b for a, b in zip(ours, theirs))
    return {
        "steps": 20,
        "last_loss": ours[-1],
        "largest_relative": away,
        "against": "torch's AdamW",
        "holds": away < 1e-3,
    }


# Trouble


def trouble(case: str) -> Found:
    return {
        "capture": _capture,
        "out-of-memory": _out_of_memory,
        "service-killed": _service_killed,
        "trainer-killed": lambda: _trainer_killed("adamw"),
        "trainer-killed-offload": lambda: _trainer_killed("offload"),
    }[case]()


def _capture() -> Found:
    """A step that is captured in a graph is refused, and training goes on."""
    model = Model(device.NAME, torch.bfloat16)
    with contextlib.closing(plimsoll.torch.AdamW(model.parameters(), lr=1e-2)) as optimizer:
        model(model.gradients(0)).backward()
        optimizer.step()
        device.synchronize()
        said = ""
        try:
            with device.capturing():
                optimizer.step()
        except (RuntimeError, PlimsollError) as error:
            said = str(error)
        optimizer.zero_grad()
        model(model.gradients(1)).backward()
        optimizer.step()
        return {"said": said, "holds": "CUDA graph" in said}


class Exhausting:
    """An optimizer's training in which the device's memory runs out in the third backward pass, once."""

    def __init__(self, model: Model):
        self.times = 0
        self._handle = model.layers[2].weight.register_hook(self._exhaust)

    def _exhaust(self, gradient: torch.Tensor) -> None:
        self.times += 1
        if self.times == 3:
            torch.empty(1 << 50, dtype=torch.uint8, device=gradient.device)


def _out_of_memory() -> Found:
    """The backward pass fails, the program clears its gradients and makes the step again: the bits are undisturbed."""

    def make(model: Model) -> Any:
        return plimsoll.torch.AdamW(model.parameters(), lr=1e-2, model=model)

    model, failed = Model(device.NAME, torch.bfloat16), []
    with contextlib.closing(make(model)) as optimizer:
        Exhausting(model)
        for step in range(STEPS):
            try:
                model(model.gradients(step)).backward()
            except torch.OutOfMemoryError as error:
                failed.append(str(error).split("\n")[0][:200])
                optimizer.zero_grad()
                model(model.gradients(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = compared(values(model, optimizer), trained("cpu", make))
    return {**found, "said": failed, "holds": found["differing"] == 0 and len(failed) == 1}


def _service_killed() -> Found:
    """The service dies by SIGKILL before and after steps, and nobody notices."""
    service, killed = Service(), 0
    model = Model(device.NAME, torch.bfloat16)
    try:
        with contextlib.closing(plimsoll.torch.AdamW(model.parameters(), lr=1e-2, socket=service.socket)) as optimizer:
            for step in range(STEPS):
                model(model.gradients(step)).backward()
                killed += _kill_workers(service.process.pid) if step else 0
                optimizer.step()
                optimizer.zero_grad()
            found = compared(
                values(model, optimizer), trained("cpu", lambda m: plimsoll.torch.AdamW(m.parameters(), lr=1e-2))
            )
    finally:
        service.close()
    return {**found, "kills": killed, "holds": found["differing"] == 0 and killed > 0}


def _kill_workers(keeper: int) -> int:
    """Kills the processes that a keeper has started. How many those were."""
    killed = 0
    for task in pathlib.Path(f"/proc/{keeper}/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    return killed


def _trainer_killed(which: str) -> Found:
    """A trainer is killed in the middle, and its successor goes on with the same bits."""
    service = Service()
    command = [sys.executable, "-m", "gpu_proof.mortal", which, service.socket]
    try:
        first = subprocess.Popen([*command, "killed"], stdout=subprocess.PIPE, text=True)
        for line in first.stdout:
            if line.startswith("step 3"):
                first.kill()
                break
        first.wait()
        done = subprocess.run([*command, "killed"], stdout=subprocess.PIPE, text=True)
        said = done.stdout.splitlines()
        undisturbed = list(mortal.train(which, service.socket, "undisturbed"))
    finally:
        service.close()
    if done.returncode != 0 or not said:
        raise RuntimeError(
            f"the second trainer ended with exit code {done.returncode}, expected 0: see the log of this part"
        )
    return {"went_on": said[0], "holds": said[-1] == undisturbed[-1] and said[0] != undisturbed[0]}


def run(group: str, case: str) -> Found:
    return {
        "adamw": adamw,
        "optimizer": optimizer,
        "offload": offload,
        "muon": muon,
        "losses": losses,
        "trouble": trouble,
    }[group](case)
