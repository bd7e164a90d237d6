"""Optimizers that StateOffload must not get wrong: with numbers of their own, state that moves, and state elsewhere."""

import threading
from contextlib import closing

import pytest
import torch

from plimsoll.torch import StateOffload
from wrapping import CHUNK_BYTES, assert_same_training, give_gradients, parameters, steps


def wrap(optimizer, **options):
    return StateOffload(optimizer, **{"chunk_bytes": CHUNK_BYTES, **options})


class Rule(torch.optim.SGD):
    """Asks ``update`` for what it adds to each parameter. ``begin`` comes before, once a step."""

    def begin(self):
        pass

    @torch.no_grad()
    def step(self, closure=None):
        self.begin()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.add_(self.update(p, group, self.state[p]), alpha=-float(group["lr"]))


class CountingItself(Rule):
    """Changes its update after many steps that it counts in itself."""

    count = 0

    def begin(self):
        self.count += 1

    def update(self, p, group, state):
        return state.setdefault("sum", torch.zeros_like(p)).add_(p.grad) * (0.5 if self.count > 6 else 1)


class CountingInATensor(Rule):
    """Counts in a tensor of its groups, in place, as capturable optimizers do."""

    def begin(self):
        for group in self.param_groups:
            group.setdefault("count", torch.zeros(())).add_(1)

    def update(self, p, group, state):
        return state.setdefault("sum", torch.zeros_like(p)).add_(p.grad) / group["count"]


class Exchanging(Rule):
    """Exchanges the tensors of two keys."""

    def update(self, p, group, state):
        old, new = state.setdefault("old", torch.zeros_like(p)), state.setdefault("new", torch.ones_like(p))
        state["old"], state["new"] = new, old.add_(p.grad)
        return state["old"] - 0.3 * state["new"]


class Drawing(Rule):
    """Draws a number for each parameter, in their order."""

    def update(self, p, group, state):
        return p.grad + torch.rand(())


def test_random_numbers_are_drawn_in_the_order_of_the_parameters():
    ps, qs = parameters(), parameters()
    theirs = Drawing(qs, lr=0.1, momentum=0.9)
    drawn = torch.get_rng_state()
    with pytest.raises(ValueError, match="Drawing draws random numbers in the order of the parameters.*use mode='whole'"):
        wrap(Drawing(ps, lr=0.1))
    with closing(wrap(Drawing(ps, lr=0.1), mode="whole", recovery=False, chunk_bytes=1)) as ours:
        assert torch.equal(torch.get_rng_state(), drawn)  # trials draw none of the program's
        for given, optimizer in ((ps, ours), (qs, theirs)):
            torch.manual_seed(7)
            steps(given, optimizer, 4)
        assert all(map(torch.equal, ps, qs))


@pytest.mark.parametrize("mode", ["chunked", "whole"])
@pytest.mark.parametrize("kind", [CountingItself, CountingInATensor, Exchanging])
def test_training_has_the_bits_of_the_optimizer(kind, mode):
    ps, qs = parameters(), parameters()
    inner, theirs = kind(ps, lr=0.1), kind(qs, lr=0.1)
    for optimizer in (inner, theirs) if kind is CountingInATensor else ():
        optimizer.param_groups[0]["count"] = torch.zeros(())
    count = inner.param_groups[0].get("count")
    with closing(wrap(inner, mode=mode, chunk_bytes=1)) as ours:
        steps(ps, ours, 9)
        steps(qs, theirs, 9)
        assert_same_training(ours, theirs, ps, qs)
        assert vars(inner).get("count") == vars(theirs).get("count")
        assert count is None or count is inner.param_groups[0]["count"] and count == 9
        assert ours._demands.recovers == (kind is Exchanging)  # a count dies with its process


class KeepingTensorsItself(Rule):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.sums = {}

    def update(self, p, group, state):
        return self.sums.setdefault(p, torch.zeros_like(p)).add_(p.grad)


class Late(Rule):
    """Has a tensor where None was, from its third step on."""

    def update(self, p, group, state):
        state["count"] = state.get("count", 0) + 1
        state["late"] = p.grad.clone() if state["count"] > 2 else None
        return p.grad


class Clipping(torch.optim.SGD):
    """Clips by the norm of all parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        return super().step(closure)


def test_refusals():
    inner = KeepingTensorsItself(parameters(), lr=0.1)
    with pytest.raises(TypeError, match="KeepingTensorsItself has tensors of its parameters in its attribute 'sums'"):
        wrap(inner, mode="whole")
    assert not inner.sums
    for learning_rate in (0.0, torch.tensor(0.0)):  # before a warm-up
        with pytest.raises(ValueError, match="Clipping updates a parameter by what it finds in others"):
            wrap(Clipping(parameters(), lr=learning_rate))
    ps = parameters()
    with closing(wrap(Late(ps, lr=0.1))) as ours:
        steps(ps, ours, 2, 4)
        with pytest.raises(RuntimeError, match="Late has changed the state 'late', which is a tensor or a number: expected None, for group0.parameter0"):
            steps(ps, ours, 1, 6)


def test_states_of_other_options_are_refused():
    ps, qs = parameters(), parameters()
    theirs = torch.optim.AdamW(qs, amsgrad=True)
    steps(qs, theirs, 1)
    with closing(wrap(torch.optim.AdamW(ps))) as ours:
        with pytest.raises(ValueError, match="the state of group0.parameter0 has also max_exp_avg_sq"):
            ours.load_state_dict(theirs.state_dict())
        assert not ours.param_groups[0]["amsgrad"]
        steps(ps, ours, 1)


def test_a_closed_optimizer_does_not_begin_anew_by_accident():
    ps = parameters()
    ours = wrap(torch.optim.AdamW(ps))
    steps(ps, ours, 2)
    saved = ours.state_dict()
    ours.close()
    for refused in (ours.step, ours.state_dict, lambda: ours.resumed_step):
        with pytest.raises(RuntimeError, match="the optimizer is closed"):
            refused()
    ours.load_state_dict(saved)
    with closing(ours):
        steps(ps, ours, 1)
        assert int(ours.state[ps[0]]["step"]) == 3


def test_hooks_of_state_dicts():
    ps, seen = parameters(), []
    inner = torch.optim.AdamW(ps)
    inner.register_state_dict_post_hook(lambda optimizer, found: seen.append((optimizer, len(found["state"]))))
    with closing(wrap(inner)) as ours:
        ours.register_state_dict_pre_hook(lambda optimizer: seen.append("before"))
        ours.register_load_state_dict_pre_hook(lambda optimizer, given: {**given, "state": {}})
        ours.register_load_state_dict_post_hook(lambda optimizer: seen.append("loaded"))
        give_gradients(ps, 0)
        ours.step()
        ours.load_state_dict(ours.state_dict())
        assert seen == ["before", (ours, len(ps)), "loaded"] and not ours.state


def test_models_that_change_before_the_first_step():
    """As by accelerate, which moves models after optimizers were made."""
    model, other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    other.load_state_dict(model.state_dict())
    theirs = torch.optim.AdamW(other.parameters())
    with closing(wrap(torch.optim.AdamW(model.parameters()))) as ours:
        model.double(), other.double()
        ps, qs = list(model.parameters()), list(other.parameters())
        steps(ps, ours, 3)
        steps(qs, theirs, 3)
        assert_same_training(ours, theirs, ps, qs)


@pytest.mark.parametrize("mode", ["chunked", "whole"])
def test_models_that_change_after_the_first_step(mode):
    model = torch.nn.Linear(8, 8)
    with closing(wrap(torch.optim.AdamW(model.parameters()), mode=mode)) as ours:
        steps(list(model.parameters()), ours, 1)
        model.bfloat16()
        with pytest.raises(RuntimeError, match="is torch.bfloat16 of .* and was torch.float32 of .*Convert the model before the first step"):
            steps(list(model.parameters()), ours, 1)


def test_a_state_that_is_being_saved_is_not_overwritten():
    ps = parameters()
    with closing(wrap(torch.optim.AdamW(ps))) as ours:
        steps(ps, ours, 1)
        saved, control = ours.state_dict(), ours._state.session.control
        control.read, read = 0, threading.Event()

        def reads():
            read.set()
            control.read = control.NOTHING_IS_READ

        timer = threading.Timer(0.2, reads)
        timer.start()
        ours.load_state_dict(saved)
        assert read.is_set()
        timer.join()
