"""The optimizer service in megatron-core: its own classes train a small GPT among gloo ranks, on the CPU."""

import contextlib
import ctypes
import gc
import hashlib
import io
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import time
import types

import pytest
import torch
import torch.multiprocessing as mp

import megatron_cpu
from gpt import ROOT
from nightly import nightly, nightly_rows
from plimsoll import PlimsollError, Service
from test_crash import workers
from test_distributed import enter, run
from test_memory import anonymous

pytest.importorskip("megatron.core")

import plimsoll.megatron  # noqa: E402
import plimsoll.torch  # noqa: E402

LAYOUTS = [(2, 1, 1), (4, 2, 2)]  # ranks, tensor parallel, pipeline parallel


class KernelAdamW(torch.optim.Optimizer):
    """An optimizer for HybridDeviceOptimizer on the CPU, with the arithmetic of the service's kernels, on fp32 weights."""

    made = 0

    def __init__(self, groups):
        super().__init__(groups, dict(lr=1e-3))
        keys = "lr", "betas", "eps", "weight_decay"
        held = [{"params": [p.clone().requires_grad_() for p in g["params"]], **{k: g[k] for k in keys}} for g in groups]
        KernelAdamW.made += 1
        self.held = plimsoll.torch.AdamW(held, sharding="local", gradients="step", name=f"kernel{KernelAdamW.made}")

    @torch.no_grad()
    def step(self, closure=None):
        pairs = [
            pair for own, held in zip(self.param_groups, self.held.param_groups) for pair in zip(own["params"], held["params"])
        ]
        for group, held in zip(self.param_groups, self.held.param_groups):
            held.update(lr=group["lr"], weight_decay=group["weight_decay"])
        for own, held in pairs:
            held.grad = own.grad.clone()
        self.held.step()
        for own, held in pairs:
            own.copy_(held)


def set_up(whose, tensor=1, pipeline=1, experts=0, gradients="bfloat16", options=None, **settings):
    """The configuration, the model and its optimizer: "ours", "theirs", or "kernel" for theirs with our arithmetic."""
    gradients = getattr(torch, gradients)
    config, model = model_for(whose, tensor, pipeline, experts, gradients, options)
    return config, model, megatron_cpu.optimizer_of(model, gradients, **settings)


def model_for(whose, tensor=1, pipeline=1, experts=0, gradients=torch.bfloat16, options=None, **size):
    megatron_cpu.pretend()
    if whose == "ours":
        plimsoll.megatron.install(**(options or {}))
    elif whose == "kernel":
        import megatron.core.optimizer

        megatron.core.optimizer.CPUAdam = KernelAdamW
    config, model = megatron_cpu.gpt(tensor, pipeline, experts, **size)
    return config, megatron_cpu.wrap(config, model, gradients)


def schedule(optimizer, step):
    """What changes in each step, as Megatron-LM's OptimizerParamScheduler changes it."""
    for group in optimizer.param_groups:
        group["lr"] = 2e-3 / (1 + step % 7)
        group["weight_decay"] = group["wd_mult"] * (0.1 + 0.01 * (step % 3))


def losses_of(rank, whose, steps, arguments):
    config, model, optimizer = set_up(whose, **arguments)
    data, losses = megatron_cpu.batches(128, 16), []
    for step in range(steps):
        schedule(optimizer, step)
        losses.append(megatron_cpu.step(config, model, optimizer, data))
    return losses


def train(whose, steps, layout, **arguments):
    world, tensor, pipeline = layout
    return run(losses_of, whose, steps, {"tensor": tensor, "pipeline": pipeline, **arguments}, world=world)


@pytest.mark.parametrize("layout,steps", [(LAYOUTS[0], 40), *nightly_rows((LAYOUTS[1], 200), ((4, 1, 1), 200), (LAYOUTS[0], 200))])
def test_losses_have_the_bits_of_their_optimizer_with_the_same_arithmetic(layout, steps):
    """With a master weight beside each parameter, both round it to bf16 alike."""
    ours = train("ours", steps, layout, options={"state": "fp32"})
    assert ours == train("kernel", steps, layout)
    assert ours[-1][-1] < ours[-1][0] - 0.2


@pytest.mark.parametrize("steps", [20, *nightly(200)])
def test_gradients_in_fp32_lose_no_bit_on_their_way(steps):
    options = {"gradients": "float32"}
    ours = train("ours", steps, LAYOUTS[0], options={"state": "fp32"}, **options)
    assert ours == train("kernel", steps, LAYOUTS[0], **options)
    rounded = train("ours", steps, LAYOUTS[0], options={"state": "fp32", "gradients": "bf16"}, **options)
    assert rounded != ours and rounded[0] == pytest.approx(ours[0], rel=5e-2)


@pytest.mark.parametrize("layout,steps", [(LAYOUTS[0], 20), *nightly_rows(((4, 1, 1), 200), ((4, 1, 2), 200))])
def test_experts_have_an_optimizer_of_their_own(layout, steps):
    ours = train("ours", steps, layout, experts=4, options={"state": "fp32"})
    assert ours == train("kernel", steps, layout, experts=4)


@pytest.mark.parametrize("layout,steps", [(LAYOUTS[1], 20), *nightly_rows((LAYOUTS[0], 200), ((4, 1, 1), 200), (LAYOUTS[1], 200))])
def test_losses_are_those_of_their_optimizer(layout, steps):
    """torch's kernel for the CPU rounds in another order, and bf16 makes more of each last bit."""
    ours, theirs = train("ours", steps, layout), train("theirs", steps, layout)
    for mine, other in zip(ours, theirs):
        assert mine == pytest.approx(other, rel=5e-2)
        assert sum(mine) == pytest.approx(sum(other), rel=1e-3)


# Checkpoints of megatron-core


def state_of(optimizer):
    """A digest of each parameter's master weight and moments, by name, on the first rank of data parallelism."""
    digests = {}
    for made in optimizer.chained_optimizers:
        digests.update(state_of_one(made))
    return digests


def state_of_one(made):
    names = {p: name for name, p in made.model_chunks[0].named_parameters()}
    state, digests = made.get_parameter_state_dp_zero(), {}
    if state is None:
        return {}
    digests["step"] = made.state_dict()["optimizer"]["param_groups"][0]["step"]
    for number, buffer in enumerate(made.buffers):
        (tensors,) = state[number].values()
        for parameter, (begin, end, _) in buffer.param_index_map.items():
            values = [tensors[key][begin:end].numpy().tobytes() for key in ("param", "exp_avg", "exp_avg_sq")]
            digests[names[parameter]] = [hashlib.sha256(v).hexdigest()[:12] for v in values]
    return digests


def document_of(model, optimizer, kind, is_loading):
    modules = model.module.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": kind}
    return {"model": modules, "optimizer": optimizer.sharded_state_dict(modules, is_loading=is_loading, metadata=metadata)}


def go_on(config, model, optimizer, data, steps=range(4, 7)):
    losses = []
    for step in steps:
        schedule(optimizer, step)
        losses.append(megatron_cpu.step(config, model, optimizer, data))
    return losses


def saving(rank, whose, folder, kind, arguments):
    from megatron.core import dist_checkpointing

    config, model, optimizer = set_up(whose, **arguments)
    data = megatron_cpu.batches(128, 16)
    go_on(config, model, optimizer, data, range(4))
    dist_checkpointing.save(document_of(model, optimizer, kind, False), folder, ("torch_dist", 1))
    state = state_of(optimizer)
    return state, go_on(config, model, optimizer, data)


def loading(rank, whose, folder, kind, arguments):
    from megatron.core import dist_checkpointing

    config, model, optimizer = set_up(whose, **arguments)
    data = megatron_cpu.batches(128, 16)
    for _ in range(8):
        next(data)
    for p in model.parameters():
        p.data.mul_(1.5)
    torch.serialization.add_safe_globals([torch.optim.AdamW])  # of the groups of HybridDeviceOptimizer
    found = dist_checkpointing.load(document_of(model, optimizer, kind, True), folder)
    model.module.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return state_of(optimizer), go_on(config, model, optimizer, data)


KINDS = ["dp_reshardable", "fully_reshardable", "dp_zero_gather_scatter"]


@pytest.mark.parametrize(
    "writer,reader,kind",
    [("theirs", "ours", KINDS[0]), ("ours", "theirs", KINDS[1]), ("ours", "ours", KINDS[2])]
    + nightly_rows(*[(w, "ours", k) for w in ("theirs", "ours") for k in KINDS], ("theirs", "theirs", KINDS[1])),
)
def test_checkpoints_of_either_are_read_by_the_other(tmp_path, writer, reader, kind):
    """HybridDeviceOptimizer of megatron-core 0.16.1 reads only "fully_reshardable" with its master weights."""
    if writer == "theirs" and kind == "dp_reshardable" and plimsoll.megatron.megatron_version.startswith("0.15."):
        pytest.skip("HybridDeviceOptimizer of megatron-core 0.15 cannot write it: its step has another shape")
    wanted = run(saving, writer, str(tmp_path), kind, {})
    found = run(loading, reader, str(tmp_path), kind, {})
    assert found[0][0] == wanted[0][0]
    for (_, losses), (_, others) in zip(found, wanted):
        assert losses == others if reader == writer else losses == pytest.approx(others, rel=2e-3)


@pytest.mark.parametrize(
    "kind,before,after,experts",
    [("dp_reshardable", (2, 1, 1), (4, 1, 1), 0)]
    + nightly_rows(
        *[(kind, (2, 1, 1), (4, 1, 1), 0) for kind in KINDS[1:]],
        *[(kind, (4, 1, 1), (2, 1, 1), 0) for kind in KINDS],
        *[(kind, (4, 2, 2), (4, 2, 2), 0) for kind in KINDS],
        *[(kind, (2, 1, 1), (2, 1, 1), 4) for kind in KINDS],
    ),
)
def test_checkpoints_are_read_by_other_numbers_of_ranks(tmp_path, kind, before, after, experts):
    layout = lambda x: {"tensor": x[1], "pipeline": x[2], "experts": experts}
    wanted = run(saving, "ours", str(tmp_path), kind, layout(before), world=before[0])
    found = run(loading, "ours", str(tmp_path), kind, layout(after), world=after[0])
    assert [state for state, _ in found if state] == [state for state, _ in wanted if state]
    assert before != after or found == wanted


# Deaths


def trained(rank, until, folder):
    """Trains on from the step that the service has, says which that is, and writes down what comes out."""
    config, model, optimizer = set_up("ours")
    step = plimsoll.megatron.resume(optimizer)
    (pathlib.Path(folder) / f"began{rank}").write_text(str(step))
    data = megatron_cpu.batches(128, 16)
    for _ in range(2 * step):
        next(data)
    go_on(config, model, optimizer, data, range(step, until))
    digest = hashlib.sha256(b"".join(p.detach().view(torch.int16).numpy().tobytes() for p in model.parameters())).hexdigest()
    (pathlib.Path(folder) / f"ended{rank}").write_text(json.dumps([digest, state_of(optimizer)]))
    for made in optimizer.chained_optimizers:
        made.optimizer.close()


def start(service, folder, until):
    """Ranks as a launcher starts them. Nobody hears what they say but from their files."""
    folder.mkdir()
    environment = {"PLIMSOLL_SOCKET": service.socket}
    arguments = [(r, 2, str(folder / "store"), environment, trained, (until, str(folder)), Deaf()) for r in range(2)]
    ranks = [mp.get_context("fork").Process(target=enter, args=given) for given in arguments]
    for rank in ranks:
        rank.start()
    return ranks


class Deaf:
    def send(self, _):
        pass


def results(folder):
    return [json.loads((folder / f"ended{r}").read_text()) for r in range(2)]


@pytest.mark.parametrize("kills", [4, *nightly(50)])
def test_no_bit_is_lost_where_ranks_are_killed(service, tmp_path, kills):
    chance, until, folder = random.Random(kills), kills + 6, tmp_path / "whole"
    began = time.monotonic()
    with contextlib.closing(Service()) as other:
        assert [r.join() or r.exitcode for r in start(other, folder, until)] == [0, 0]
    took, wanted, resumed = time.monotonic() - began, results(folder), []
    for round in range(kills + 1):
        ranks = start(service, folder := tmp_path / str(round), until)
        if round < kills:
            while not all((folder / f"began{r}").exists() for r in range(2)):
                assert all(r.is_alive() for r in ranks)
                time.sleep(0.001)
            resumed.append(int((folder / "began0").read_text() or 0))
            time.sleep(chance.random() * 3 * took / until / 2)
            for rank in chance.sample(ranks, 2):
                rank.kill()
                time.sleep(chance.choice([0, 0.002, 0.01]))
        for rank in ranks:
            rank.join()
    assert results(folder) == wanted
    assert resumed == sorted(resumed)


def test_two_optimizers_that_are_at_different_steps_are_refused():
    one, other = (types.SimpleNamespace(optimizer=types.SimpleNamespace(resumed_step=step)) for step in (4, 3))
    with pytest.raises(PlimsollError, match="the optimizers of this model are at steps 3 and 4: the trainer died between them"):
        plimsoll.megatron.resume(types.SimpleNamespace(chained_optimizers=[one, other]))


# Memory


def private_and_shared(pids):
    """Bytes of anonymous memory of processes, and of the shared memory that they have open. What is anonymous counts whole:
    its share would grow whenever another fork of the tests ends. So would that of what is shared, as others map and unmap it.
    """
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    texts = [pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    private = sum(int(kib) * 1024 for text in texts for kib in re.findall(r"^Anonymous: +(\d+)", text, re.M))
    return private + sum({found.st_ino: found.st_blocks * 512 for pid in pids for found in memory_files(pid)}.values())


def memory_files(pid):
    """The files in memory that a process has open."""
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it is closed by now
            if os.readlink(fd).startswith(("/memfd:", "/dev/shm/")):
                yield fd.stat()


def host_bytes(rank, whose, layers):
    """The parameters of a model, and the host memory of its optimizer after the second step."""
    ctypes.CDLL("libc.so.6").prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: huge pages would count what nobody has touched
    config, model = model_for(whose, layers=layers, hidden=768)
    for p in model.parameters():
        p.main_grad.zero_()  # so that its memory is there
    pids = [os.getpid()]
    before, optimizer = private_and_shared(pids), megatron_cpu.optimizer_of(model)
    for _ in range(2):
        for p in model.parameters():
            p.main_grad.fill_(1e-3)
        optimizer.step()
    if whose == "ours":
        pids += workers(optimizer.chained_optimizers[0].optimizer._held._shards.service)
    return sum(p.numel() for p in model.parameters()), private_and_shared(pids) - before


def host_bytes_a_parameter(whose):
    """Between a small and a large model, so that what a service has of its own does not count."""
    ((few, small),), ((many, large),) = (run(host_bytes, whose, layers, world=1) for layers in (2, 8))
    return (large - small) / (many - few)


def test_the_host_has_14_bytes_a_parameter():
    """Theirs has 16 here: pinned memory, which is rounded up to powers of two, is plain memory on the CPU. Of that, which is
    anonymous, libraries may give some tens of MB back between the two measurements.
    """
    assert 13 < host_bytes_a_parameter("ours") <= 14.1
    assert host_bytes_a_parameter("theirs") > 15


def copies(rank, scratch):
    """The private memory that copies of the state take, of each parameter."""
    config, model = model_for("ours", options={"scratch": scratch}, layers=4, hidden=768)
    optimizer = megatron_cpu.optimizer_of(model)
    for p in model.parameters():
        p.main_grad.fill_(1e-3)
    optimizer.step()
    gc.collect()
    before = anonymous()  # what was freed has gone back
    state = [dict(entry) for made in optimizer.chained_optimizers for entry in made.optimizer.state.values()]
    taken, files = (anonymous() - before) / sum(p.numel() for p in model.parameters()), os.listdir(scratch) if scratch else []
    return taken, files, [hashlib.sha256(v.numpy().tobytes()).hexdigest() for entry in state for v in entry.values()]


def test_copies_of_the_state_are_in_files_where_there_is_a_folder(tmp_path):
    ((there, files, inside),), ((here, _, outside),) = (run(copies, scratch, world=1) for scratch in (str(tmp_path), None))
    assert there < 0.5 and here > 11.5
    assert files == [] and inside == outside


# CUDA, as far as a host without a GPU has it


def planned(program):
    """What ``plimsoll plan`` prints of a program that it runs."""
    if shutil.which("cc") is None and not os.environ.get("PLIMSOLL_GHOST"):
        pytest.skip("there is no C compiler for the library that stands in for CUDA")
    command = [os.environ["PLIMSOLL"], "plan", "--gpu", "A100-40GB", "--long", "--", sys.executable, str(program)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / "python" / x) for x in ("", "tests"))}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def test_on_cuda_it_runs_in_a_plan():
    """Kernels compute nothing there, and all else is as on a GPU: types, streams, pinned memory and overlaps."""
    said = planned(ROOT / "python" / "tests" / "on_stage.py")
    assert "2 optimizer steps" in said and "fits: " in said, said


def test_an_optimizer_of_the_service_runs_in_a_plan(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, plimsoll.torch\n"
        "model = torch.nn.Linear(256, 256).bfloat16().cuda()\n"
        "optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-3)\n"
        "for _ in range(3):\n"
        "    model(torch.ones(4, 256, device='cuda').bfloat16()).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    said = planned(program)
    assert "2 optimizer steps" in said and "fits: " in said, said


# What is refused


def refused(rank, settings):
    try:
        set_up("ours", **settings)
    except ValueError as error:
        return str(error)


PLAIN = {"use_precision_aware_optimizer": False, "main_grads_dtype": torch.float32}


@pytest.mark.parametrize(
    "settings,says",
    [
        ({"optimizer_cpu_offload": False, **PLAIN}, "optimizer_cpu_offload is off: add --optimizer-cpu-offload"),
        ({"optimizer_offload_fraction": 0.5}, "optimizer_offload_fraction is 0.5, and all of the state is on the host: add --optimizer"),
        (PLAIN, "use_precision_aware_optimizer is off, so megatron-core would hold fp32 weights on"),
        ({"bf16": False, "fp16": True}, "fp16 is on, and was not tested: expected bf16 (--bf16)"),
        ({"exp_avg_dtype": torch.bfloat16}, "exp_avg_dtype is torch.bfloat16: expected torch.float32; leave --exp-avg-dtype out"),
    ],
)
def test_what_is_refused(settings, says):
    (found,) = run(refused, settings, world=1)
    assert found.startswith("plimsoll.megatron: " + says)


def with_fp8(rank):
    plimsoll.megatron.is_float8tensor = lambda parameter: parameter.dim() == 2  # what Transformer Engine would make
    return refused(rank, {})


def test_parameters_in_fp8_are_refused():
    (found,) = run(with_fp8, world=1)
    assert found == "plimsoll.megatron: parameters are in fp8, and were not tested: leave --fp8-param-gather out"


@pytest.mark.parametrize(
    "options,error,says",
    [
        ({"sharding": "zero1"}, TypeError, "install() has no option sharding: expected state, moments, gradients, scratch, job or socket"),
        ({"moments": "int8"}, ValueError, "moments is 'int8': expected one of 'fp32', 'bf16'"),
        ({"gradients": "fp16"}, ValueError, "gradients is 'fp16': expected one of None, 'bf16'"),
        ({"scratch": "/nowhere"}, ValueError, "scratch is '/nowhere', which is no folder: expected one on a disk of this host"),
    ],
)
def test_options_that_there_are_not(options, error, says):
    with pytest.raises(error, match=re.escape(says)):
        plimsoll.megatron.install(**options)


def pickled(rank):
    config, model, optimizer = set_up("ours")
    (made,) = optimizer.chained_optimizers
    megatron_cpu.step(config, model, optimizer, megatron_cpu.batches(128, 16))
    state = torch.load(io.BytesIO(saved(made.optimizer.state_dict())), weights_only=True)["state"]
    first = next(iter(made.optimizer.state.values()))
    return [torch.equal(state[0][name], first[name]) for name in ("step", "exp_avg", "exp_avg_sq", "master_param")]


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_a_state_dict_is_saved_as_plain_tensors():
    assert run(pickled, world=1) == [[True] * 4]
