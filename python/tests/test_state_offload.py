"""StateOffload: the bits of the wrapped optimizer, whose state is on the host."""

import copy
import gc
import pickle
from contextlib import closing

import pytest
import torch

import plimsoll.torch
from plimsoll.torch import StateOffload
from wrapping import CHUNK_BYTES, OPTIMIZERS, STEPS, assert_same_training, give_gradients, parameters, same, steps

WAYS = [
    {},
    {"chunk_bytes": 1},
    {"chunk_bytes": 64 << 20},
    {"fraction": 0.3},
    {"fraction": 0.0},
    {"recovery": False},
    {"mode": "whole"},
    {"mode": "whole", "recovery": False},
    {"mode": "whole", "fraction": 0.3},
]


def wrap(optimizer, **options):
    return StateOffload(optimizer, **{"chunk_bytes": CHUNK_BYTES, **options})


def name_of(value):
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


@pytest.mark.each_choice
@pytest.mark.parametrize("way", WAYS, ids=name_of)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_has_the_bits_of_the_optimizer(name, way):
    ps, qs = parameters(), parameters()
    theirs = OPTIMIZERS[name](qs)
    with closing(wrap(OPTIMIZERS[name](ps), **way)) as ours:
        steps(ps, ours, STEPS)
        steps(qs, theirs, STEPS)
        assert_same_training(ours, theirs, ps, qs)


@pytest.mark.parametrize("mode", ["chunked", "whole"])
def test_fifty_steps(mode):
    ps, qs = parameters(), parameters()
    theirs = torch.optim.AdamW(qs, lr=1e-2)
    with closing(wrap(torch.optim.AdamW(ps, lr=1e-2), mode=mode)) as ours:
        steps(ps, ours, 50)
        steps(qs, theirs, 50)
        assert_same_training(ours, theirs, ps, qs)


def matrices(ps):
    return [p for p in ps if p.ndim == 2 and p.numel()]


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_muon(way):
    ps, qs = matrices(parameters()), matrices(parameters())
    theirs = torch.optim.Muon(qs, lr=1e-2)
    with closing(wrap(torch.optim.Muon(ps, lr=1e-2), **way)) as ours:
        steps(ps, ours, STEPS)
        steps(qs, theirs, STEPS)
        assert_same_training(ours, theirs, ps, qs)


def half(master, how):
    """What a bf16 parameter is of its master weight: rounded, or the upper half."""
    if how == "fp32":
        return master.detach().bfloat16()
    return (master.detach().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["chunked", "whole"])
@pytest.mark.parametrize("master", ["fp32", "split"])
def test_masters_are_those_of_fp32_training(master, mode, moments):
    ps = parameters(dtype=torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in ps]
    theirs = torch.optim.AdamW(masters, lr=1e-2)
    with closing(wrap(torch.optim.AdamW(ps, lr=1e-2), mode=mode, master=master, moments=moments)) as ours:
        for step in range(6):
            give_gradients(ps, step, without=(1,) if step == 2 else ())
            for p, m in zip(ps, masters):
                m.grad = None if p.grad is None else p.grad.float()
            theirs.step()
            ours.step()
            for entry in theirs.state.values() if moments == "bf16" else ():
                for key in ("exp_avg", "exp_avg_sq"):
                    entry[key].copy_(entry[key].bfloat16())
            assert all(same(p, half(m, master)) for p, m in zip(ps, masters))
        entries = ours.state_dict()["state"]
        assert all(same(entries[i]["master_weights"], m) for i, m in enumerate(masters))
        assert all(same(entries[i][k], e[k]) for i, e in enumerate(theirs.state.values()) for k in ("exp_avg", "exp_avg_sq"))


def test_halves_keep_every_bit_pattern():
    from plimsoll.torch.masters import join, split

    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200, 1000), generator=generator, dtype=torch.int64).to(torch.int32)
    special = torch.tensor([0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7F7FFFFF, 1, 0x8000, 0x7FFF, 0], dtype=torch.int32)
    bits[0, :9], bits[1, :9] = special, special | torch.tensor(-(2**31), dtype=torch.int32)
    for master in (bits.view(torch.float32), bits.view(torch.float32).t()):
        parameter = torch.empty_like(master, dtype=torch.bfloat16)
        low = torch.empty_like(master, dtype=torch.int16)
        split(master, parameter, low)
        assert torch.equal(join(parameter, low).view(torch.int32), master.view(torch.int32))
        assert torch.equal(parameter.view(torch.int16), (master.view(torch.int32) >> 16).to(torch.int16))


@pytest.mark.parametrize("master", ["fp32", "split"])
def test_weights_that_the_program_writes_count(master):
    """Of a master weight those elements stay that the program has left as they were."""
    ps = parameters(dtype=torch.bfloat16)
    with closing(wrap(torch.optim.SGD(ps, lr=0.0), master=master)) as ours:
        give_gradients(ps, 0)
        ours.step()
        ps[0].data[:, 3] = 5
        ours.param_groups[0]["lr"] = 0.125
        for p in ps:
            p.grad = torch.ones_like(p)
        ours.step()
        assert (ps[0][:, 3] == 4.875).all()


def test_layouts_and_host_bytes():
    """14 bytes a parameter for AdamW on bf16, 10 for Muon, and one more region."""
    shape = (1 << 10, 1 << 8)
    for optimizer, options, expected in [
        (torch.optim.AdamW, {"master": "split"}, 14),
        (torch.optim.AdamW, {"master": "fp32"}, 16),
        (torch.optim.AdamW, {"master": "split", "recovery": False}, 10),
        (torch.optim.AdamW, {"master": "split", "moments": "bf16"}, 10),
        (torch.optim.Muon, {"master": "split"}, 10),
        (torch.optim.Muon, {"master": "split", "moments": "bf16", "recovery": False}, 4),
    ]:
        ps = [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(100)]
        wrapped = StateOffload(optimizer(ps), chunk_bytes=1, **options)
        assert wrapped.host_bytes / (100 * ps[0].numel()) == pytest.approx(expected, rel=0.012)  # a hundredth is the gap
        wrapped.close()


def test_channels_last():
    def made():
        torch.manual_seed(0)
        return torch.nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)

    one, other = made(), made()
    with closing(wrap(torch.optim.AdamW(one.parameters(), fused=True))) as ours:
        theirs = torch.optim.AdamW(other.parameters(), fused=True)
        steps(list(one.parameters()), ours, 3)
        steps(list(other.parameters()), theirs, 3)
        assert_same_training(ours, theirs, list(one.parameters()), list(other.parameters()))


# What works as with torch


def test_schedulers_hooks_and_closures():
    ps, qs = parameters(), parameters()
    ours, theirs = wrap(torch.optim.SGD(ps, lr=0.1, momentum=0.9)), torch.optim.SGD(qs, lr=0.1, momentum=0.9)
    seen = []
    ours.register_step_post_hook(lambda *_: seen.append("after"))
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 5) for o in (ours, theirs)]
    assert isinstance(ours, torch.optim.Optimizer)

    def closure():
        seen.append("closure")
        return torch.tensor(3.0)

    for step in range(4):
        for optimizer, given, scheduler in ((ours, ps, schedulers[0]), (theirs, qs, schedulers[1])):
            give_gradients(given, step)
            assert optimizer.step(closure) == 3
            scheduler.step()
    assert seen == ["closure", "after", "closure"] * 4
    assert_same_training(ours, theirs, ps, qs)
    ours.zero_grad()
    assert all(p.grad is None for p in ps)
    ours.close()


def test_grad_scaler():
    ps, qs = parameters(), parameters()
    ours, theirs = wrap(torch.optim.AdamW(ps, fused=True)), torch.optim.AdamW(qs)
    for optimizer, given in ((ours, ps), (theirs, qs)):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = sum((p * (step + 1)).square().sum() for p in given) * (float("inf") if step == 1 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert all(torch.allclose(p, q) for p, q in zip(ps, qs)) and int(ours.state[ps[0]]["step"]) == 3
    ours.close()


@pytest.mark.parametrize("mode", ["chunked", "whole"])
@pytest.mark.parametrize("fraction", [1.0, 0.3])
def test_state_dicts_go_both_ways(mode, fraction):
    ps, qs, rs = parameters(), parameters(), parameters()
    theirs = torch.optim.AdamW(qs, lr=1e-2)
    steps(qs, theirs, 3)
    with closing(wrap(torch.optim.AdamW(ps, lr=1), mode=mode, fraction=fraction)) as ours:
        for p, q in zip(ps, qs):
            p.data.copy_(q)
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
        for step in range(3, 6):
            steps(ps, ours, 1, step)
            steps(qs, theirs, 1, step)
        assert_same_training(ours, theirs, ps, qs)
        plain = torch.optim.AdamW(rs, lr=1)
        plain.load_state_dict(copy.deepcopy(ours.state_dict()))
        for p, r in zip(ps, rs):
            r.data.copy_(p)
        steps(ps, ours, 2, 6)
        steps(rs, plain, 2, 6)
        assert_same_training(ours, plain, ps, rs)
        with pytest.raises(ValueError, match="the state of group0.parameter0 lacks exp_avg"):
            ours.load_state_dict({**theirs.state_dict(), "state": {0: {"step": torch.tensor(1.0)}}})
        assert_same_training(ours, plain, ps, rs)


def test_a_state_that_the_optimizer_has_already_is_taken():
    ps, qs = parameters(), parameters()
    inner, theirs = torch.optim.AdamW(ps), torch.optim.AdamW(qs)
    steps(ps, inner, 2)
    steps(qs, theirs, 2)
    with closing(wrap(inner)) as ours:
        steps(ps, ours, 2, 2)
        steps(qs, theirs, 2, 2)
        assert_same_training(ours, theirs, ps, qs)
        assert not inner.state


def test_state_is_readable():
    ps = parameters()
    with closing(wrap(torch.optim.AdamW(ps))) as ours:
        assert not ours.state and len(ours.state) == 0
        steps(ps, ours, 1)
        assert ps[3] not in ours.state and set(ours.state[ps[0]]) == {"step", "exp_avg", "exp_avg_sq"}
        with pytest.raises(RuntimeError, match="copies of the service's state"):
            ours.state[ps[0]]["exp_avg"].zero_()
        with pytest.raises(TypeError, match="StateOffload is not copied or pickled"):
            copy.deepcopy(ours)
        with pytest.raises(TypeError, match="StateOffload is not copied or pickled"):
            pickle.dumps(ours)


def test_add_param_group():
    ps = parameters()
    ours = wrap(torch.optim.AdamW(ps[:2], lr=1e-2))
    ours.add_param_group({"params": ps[2:], "lr": 1e-3})
    qs = parameters()
    theirs = torch.optim.AdamW([{"params": qs[:2]}, {"params": qs[2:], "lr": 1e-3}], lr=1e-2)
    steps(ps, ours, 3)
    steps(qs, theirs, 3)
    assert_same_training(ours, theirs, ps, qs)
    with pytest.raises(RuntimeError, match="add all groups before the first step"):
        ours.add_param_group({"params": parameters(shapes=[(2, 2)])})
    ours.close()


def test_checkpoints(tmp_path):
    """The service saves a step while the next ones are made."""
    ps = parameters(dtype=torch.bfloat16)
    with closing(wrap(torch.optim.AdamW(ps, lr=1e-2), master="split")) as ours:
        steps(ps, ours, 3)
        assert ours.save(tmp_path, {"epoch": 7}) == 3
        steps(ps, ours, 3, 3)
        assert ours.saved() == 3
        expected, state = [p.detach().clone() for p in ps], ours.state_dict()["state"]
        steps(ps, ours, 2, 6)
        assert ours.load(tmp_path) == {"epoch": 7} and ours.resumed_step == 3
        steps(ps, ours, 3, 3)
        assert all(map(same, ps, expected))
        assert all(same(v, state[i][k]) for i, e in ours.state_dict()["state"].items() for k, v in e.items())


# What is refused


class Dependent(torch.optim.SGD):
    """Clips by the norm of all parameters, in its step."""

    @torch.no_grad()
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        return super().step(closure)


class Counting(torch.optim.SGD):
    """Has a number in its groups that follows from the parameters of a call, once they are larger."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if sum(p.numel() for p in group["params"]) > 100:
                group["seen"] = group.get("seen", 0) + sum(p.numel() for p in group["params"])
        return super().step(closure)


def test_optimizers_whose_parameters_depend_on_each_other():
    with pytest.raises(ValueError, match="Dependent updates a parameter by what it finds in others.*use mode='whole'"):
        wrap(Dependent(parameters(), momentum=0.9))
    for optimizer in (Dependent, Counting):
        ps, qs = parameters(), parameters()
        theirs = optimizer(qs, momentum=0.9)
        with closing(wrap(optimizer(ps, momentum=0.9), mode="whole")) as ours:
            steps(ps, ours, 3)
            steps(qs, theirs, 3)
            assert_same_training(ours, theirs, ps, qs)
    ps = parameters()
    ours = wrap(Counting(ps, momentum=0.9), chunk_bytes=1)
    with pytest.raises(RuntimeError, match="Counting changes the option 'seen'.*use mode='whole'"):
        steps(ps, ours, 1)
    with pytest.raises(RuntimeError, match="step 1 failed after it had changed some parameters, and cannot be finished"):
        steps(ps, ours, 1)
    ours.close()


class Strange(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["what"] = bytearray()


class Growing(torch.optim.SGD):
    """Has one more key in its third step."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            entry = self.state[p]
            entry["count"] = entry.get("count", 0) + 1
            if entry["count"] > 2:
                entry["late"] = 1


def test_refusals():
    ps = parameters()
    for made, error, message in [
        (lambda: StateOffload(ps), TypeError, "optimizer is a list: expected a torch.optim.Optimizer"),
        (lambda: wrap(torch.optim.LBFGS(ps)), TypeError, "LBFGS, which calls the closure itself"),
        (lambda: wrap(torch.optim.SparseAdam(ps)), TypeError, "SparseAdam, whose gradients are sparse"),
        (lambda: wrap(torch.optim.Adam(ps, differentiable=True)), ValueError, "differentiable is True in parameter group 0"),
        (lambda: wrap(plimsoll.torch.AdamW(ps)), TypeError, "AdamW of plimsoll.torch, whose state is on the host already"),
        (lambda: wrap(Strange(ps)), TypeError, "the state 'what' of group0.parameter0 is a bytearray: expected tensors and numbers"),
        (lambda: wrap(torch.optim.SGD(ps), mode="all"), ValueError, "mode is 'all': expected one of 'chunked', 'whole'"),
        (lambda: wrap(torch.optim.SGD(ps), chunk_bytes=0), ValueError, "chunk_bytes is 0"),
        (lambda: wrap(torch.optim.SGD(ps), fraction=1.5), ValueError, "fraction is 1.5: expected 0 to 1"),
        (lambda: wrap(torch.optim.SGD([p.detach().half().requires_grad_() for p in ps]), master="split"), ValueError, "is torch.float16"),
    ]:
        with pytest.raises(error, match=message):
            made()
    ours = wrap(torch.optim.SGD(ps, lr=0.1))
    with pytest.raises(ValueError, match="StateOffload of plimsoll.torch holds the state of these parameters"):
        plimsoll.torch.AdamW(ps).open()
    give_gradients(ps, 0)
    ps[0].grad = ps[0].grad.to_sparse()
    with pytest.raises(TypeError, match="the gradient of group0.parameter0 is torch.sparse_coo"):
        ours.step()
    with pytest.raises(RuntimeError, match="call step\\(\\) of the StateOffload"):
        ours._wrapped.optimizer.step()
    ours.close()
    other = plimsoll.torch.SGD(ps)
    other.open()
    with pytest.raises(ValueError, match="SGD of plimsoll.torch holds the state of these parameters"):
        wrap(torch.optim.SGD(ps))
    del other
    gc.collect()
    wrap(torch.optim.SGD(ps)).close()


class Stepping(torch.optim.SGD):
    """Counts steps in its groups, as schedule-free optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_options_that_the_optimizer_changes_itself(service):
    """Every chunk sees those of before the step. They are not in the arenas, so nobody goes on from these."""
    ps, qs = parameters(), parameters()
    theirs = Stepping(qs, momentum=0.9)
    with closing(wrap(Stepping(ps, momentum=0.9), socket=service.socket)) as ours:
        steps(ps, ours, 3)
        steps(qs, theirs, 3)
        assert_same_training(ours, theirs, ps, qs)
        assert ours.param_groups[0]["k"] == 3
    with closing(wrap(Stepping(parameters(), momentum=0.9), socket=service.socket)) as ours:
        with pytest.raises(RuntimeError, match="or options that the optimizer changes itself: load a checkpoint"):
            steps(ps, ours, 1)


def test_gradients_of_another_type():
    ps = parameters(dtype=torch.bfloat16)
    ours = wrap(torch.optim.SGD(ps, momentum=0.9), master="split")
    give_gradients(ps, 0)
    ours.step()
    if not hasattr(ps[0], "grad_dtype"):
        ours.close()
        return  # this torch knows gradients of the parameter's type only
    for p in ps:
        p.grad = None
        p.grad_dtype = torch.float32
        p.grad = torch.ones(p.shape)
    with pytest.raises(TypeError, match="is torch.float32: expected torch.bfloat16"):
        ours.step()
    ours.close()
    with closing(wrap(torch.optim.SGD(ps, momentum=0.9), master="split")) as ours:
        ours.step()


def test_a_state_that_grows_is_refused():
    ps = parameters()
    ours = wrap(Growing(ps))
    steps(ps, ours, 2, 4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has the state count, late for group0.parameter0: expected count"):
            steps(ps, ours, 1, 6)
    assert ours.state_dict()["state"][0] == {"count": 2}
    ours.close()


class Failing(torch.optim.AdamW):
    """Fails in a call."""

    calls = 1 << 30

    def step(self, closure=None):
        Failing.calls -= 1
        if Failing.calls == 0:
            raise MemoryError("out of memory")
        return super().step(closure)


def test_a_step_that_fails_is_finished():
    ps, qs = parameters(), parameters()
    theirs = torch.optim.AdamW(qs, lr=1e-2)
    with closing(wrap(Failing(ps, lr=1e-2), chunk_bytes=1)) as ours:
        steps(ps, ours, 3)
        Failing.calls = 3
        with pytest.raises(MemoryError):
            steps(ps, ours, 1, 3)
        with pytest.raises(RuntimeError, match="It is finished now, with the gradients that it began with"):
            steps(ps, ours, 1, 4)
        steps(ps, ours, 1, 4)
        steps(qs, theirs, 5)
        assert_same_training(ours, theirs, ps, qs)
