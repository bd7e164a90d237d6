"""PyTorch's own database of optimizers and their arguments, OptimizerInfo, and what PyTorch tests with it.

Tests have the names that they have in TestOptimRenewed of PyTorch's test/test_optim.py. Arguments and tests that fail by
design are in a table of docs/python.md, and fail here where they do not fail.
"""

import contextlib
import copy
import inspect
import io
import itertools
import re

import pytest
import torch
from torch.nn import Parameter
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing import assert_close
from torch.testing._internal.common_optimizers import optim_db

import plimsoll.torch

from gpt import ROOT

# Muon has groups of matrices, and the database has none: test_muon.py compares it with torch's.
INFOS = {i.optim_cls.__name__: i for i in optim_db if i.optim_cls.__name__ in {*plimsoll.torch.__all__} - {"Muon"}}
pytestmark = pytest.mark.usefixtures("one_service")
IMPLEMENTATIONS = {"foreach": False, "fused": False, "capturable": False}
DOCS = (ROOT / "docs" / "python.md").read_text()
TABLE = re.search(r"\| argument or test of PyTorch \| .*\n\|---\|---\|\n((?:\|.*\n)+)", DOCS)
BY_DESIGN = dict(re.findall(r"^\| `(.*?)` \| (.*) \|$", TABLE[1], re.MULTILINE))
met = set()


class Case:
    """An optimizer of the database with some arguments."""

    def __init__(self, name, arguments, description, dtype=torch.float32):
        self.name, self.arguments, self.dtype, self.info = name, arguments, dtype, INFOS[name]
        self.description = description
        self.id = f"{name}-{description}" + (f"-{dtype}" if dtype is not torch.float32 else "")

    def ours(self, parameters, **arguments):
        return getattr(plimsoll.torch, self.name)(parameters, **{**copy.deepcopy(self.arguments), **arguments})

    def theirs(self, parameters, **arguments):
        return getattr(torch.optim, self.name)(parameters, **{**copy.deepcopy(self.arguments), **arguments})

    def plain(self, parameters, **arguments):
        """That of torch, in its plain implementation. Some arguments of the database are for CUDA."""
        known = inspect.signature(getattr(torch.optim, self.name)).parameters
        return self.theirs(parameters, **{k: v for k, v in IMPLEMENTATIONS.items() if k in known}, **arguments)

    def fails(self, test):
        """The rows of the table that say that this fails."""
        tried = [test, f"dtype={self.dtype}", *(f"{k}={v}" for k, v in self.arguments.items())]
        return [what for what in tried if what in BY_DESIGN]


def cases(dtype=torch.float32):
    """What the database has. Arguments for CUDA are among them: nothing here depends on where parameters are."""
    return [Case(n, x.kwargs, x.desc, dtype) for n, i in INFOS.items() for x in i.optim_inputs_func(device="cuda", dtype=dtype)]


def with_flags():
    """The same with each flag that PyTorch's helper adds: first all False, then one True."""
    for case in cases():
        off = {**dict.fromkeys(case.info.supported_impls, False), **case.arguments}
        yield Case(case.name, off, f"{case.description}-no flag")
        for flag in case.info.supported_impls:
            yield Case(case.name, {**off, flag: True}, f"{case.description}-{flag}")


@contextlib.contextmanager
def refused(rows):
    """The error that one of the rows names. Its message ends with what to do instead: with StateOffload, if the row says so."""
    with pytest.raises((ValueError, TypeError)) as refusal:
        yield
    said = str(refusal.value)
    named = [BY_DESIGN[row] for row in rows if refusal.type.__name__ in BY_DESIGN[row]]
    assert ("StateOffload" in said) in ["StateOffload" in why for why in named], said
    assert re.search(r"(an optimizer of torch(, whose states plimsoll\.torch\.StateOffload .*)?|load this one's state_dict\(\) there)$", said)


def over(cases):
    """Runs a test over cases. Those that the table of docs/python.md lists must be refused as it says.

    Where pytest is told by a mark that a test fails, it describes each failure: that takes longer than the tests.
    """
    cases = list(cases)

    def parametrize(test):
        met.update(row for case in cases for row in case.fails(test.__name__))

        def fails_where_listed(case):
            rows = case.fails(test.__name__)
            with refused(rows) if rows else contextlib.nullcontext():
                test(case)

        fails_where_listed.__doc__ = test.__doc__
        return pytest.mark.parametrize("case", cases, ids=lambda case: case.id)(fails_where_listed)

    return parametrize




class Problem:
    """A small regression. Two of the same dtype are the same."""

    def __init__(self, dtype=torch.float32, contiguous=True):
        generator = torch.Generator().manual_seed(0)
        weight, bias, x = (torch.randn(shape, generator=generator).to(dtype) for shape in ((10, 5, 2), (10, 2), (5,)))
        take = torch.Tensor.contiguous if contiguous else torch.Tensor.detach
        self.weight, self.bias, self.x = Parameter(take(weight[..., 0])), Parameter(take(bias[..., 0])), x
        self.parameters = [self.weight, self.bias]

    def loss(self):
        return (self.weight.mv(self.x) + self.bias).pow(2).sum()

    def closure(self, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        return closure

    def train(self, optimizer, steps, schedulers=()):
        for _ in range(steps):
            loss = optimizer.step(self.closure(optimizer))
            for scheduler in schedulers:
                scheduler.step(*[loss.detach()] * isinstance(scheduler, ReduceLROnPlateau))

    def is_close_to(self, other, **tolerance):
        assert_close(self.parameters, other.parameters, **tolerance)


def both(case, groups=lambda problem: problem.parameters, **arguments):
    """The same problem with the optimizer here and with torch's."""
    ours, theirs = Problem(case.dtype), Problem(case.dtype)
    return ours, case.ours(groups(ours), **arguments), theirs, case.plain(groups(theirs), **arguments)


# Arguments


@pytest.mark.parametrize("name", INFOS)
def test_signatures_are_torchs(name):
    made_of = plimsoll.torch.optimizer.Optimizer.__init__, plimsoll.torch.settings.Settings.checked
    own = {n: p for function in made_of for n, p in inspect.signature(function).parameters.items()}
    ours = list(inspect.signature(getattr(plimsoll.torch, name)).parameters.values())
    theirs = list(inspect.signature(getattr(torch.optim, name)).parameters.values())
    shape = [[(p.name, p.kind, p.default) for p in some] for some in (ours, theirs)]
    assert shape[0][: len(theirs)] == shape[1]
    options = [(p.name, p.kind, p.default) for p in own.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert sorted(shape[0][len(theirs) :]) == sorted(options)
    assert all(p.annotation is not inspect.Parameter.empty for p in ours)


@pytest.mark.parametrize("name", [n for n in plimsoll.torch.__all__ if hasattr(getattr(plimsoll.torch, n), "zero_grad") and n not in ("Muon", "StateOffload")])
def test_help_says_what_every_argument_does(name):
    optimizer = getattr(plimsoll.torch, name)
    said = re.findall(r"^    (\w+): .", inspect.getdoc(optimizer), re.MULTILINE)
    assert said == list(inspect.signature(optimizer).parameters)


@over(with_flags())
def test_parameter_groups_are_torchs(case):
    ours, theirs = (make(Problem().parameters) for make in (case.ours, case.theirs))
    strip = [{k: v for k, v in g.items() if k != "params"} for o in (ours, theirs) for g in o.param_groups]
    assert strip[0] == strip[1] and ours.defaults == theirs.defaults
    repr(ours)


@pytest.mark.parametrize("name", INFOS)
def test_errors(name):
    errors = INFOS[name].optim_error_inputs_func(device="cpu", dtype=torch.float32)
    assert len(errors) >= 8
    for error in errors:
        wanted, given = error.error_type, error.optimizer_error_input
        expect = pytest.warns if issubclass(wanted, Warning) else pytest.raises
        with expect(wanted, match=error.error_regex):
            getattr(plimsoll.torch, name)(given.params, **given.kwargs)


# Steps


@over(with_flags())
def test_foreach_matches_forloop(case):
    ours, optimizer, theirs, reference = both(case)
    ours.train(optimizer, 7)
    theirs.train(reference, 7)
    ours.is_close_to(theirs)


@over([c for dtype in (torch.bfloat16, torch.float16, torch.float64) for c in cases(dtype)])
def test_fused_matches_forloop(case):
    ours, optimizer, theirs, reference = both(case)
    ours.train(optimizer, 7)
    theirs.train(reference, 7)
    # torch rounds moments and weights to 16 bits in each step.
    ours.is_close_to(theirs, atol=2e-2, rtol=2e-2)


@over(cases())
def test_forloop_goes_right_direction(case):
    for contiguous in (True, False):
        problem = Problem(contiguous=contiguous)
        optimizer = case.ours(problem.parameters)
        before = problem.loss().item()
        problem.train(optimizer, 20)
        after = problem.loss().item()
        assert (after > before) if case.arguments.get("maximize") else (after < before)


@over(cases())
def test_param_group_with_lrscheduler_goes_right_direction(case):
    def groups(problem):
        return [{"params": [problem.weight]}, {"params": [problem.bias], "lr": 1e-2}]

    for schedules in case.info.scheduler_inputs:
        ours, optimizer, theirs, reference = both(case, groups, lr=1e-3)
        ours.train(optimizer, 6, [make(optimizer) for make in schedules])
        theirs.train(reference, 6, [make(reference) for make in schedules])
        assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in reference.param_groups]
        ours.is_close_to(theirs)


@over(cases())
def test_rosenbrock(case):
    # The function has no upper bound.
    rate, steps = (1e-5, 20) if case.arguments.get("maximize") else (1e-3, 100)
    found = []
    for make in (case.ours, case.plain):
        p = torch.tensor([1.5, 1.5], requires_grad=True)
        optimizer = make([p], lr=rate)
        for _ in range(steps):
            optimizer.zero_grad()
            ((1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2).backward()
            optimizer.step()
        found.append(p)
    assert_close(*found, rtol=2e-4, atol=1e-5)
    assert found[0].isfinite().all()


@over([c for c in cases() if c.info.supports_sparse])
def test_rosenbrock_sparse(case):
    p = torch.tensor([1.5, 1.5], requires_grad=True)
    optimizer = case.ours([p])
    p.grad = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)
    optimizer.step()


@over(cases())
def test_param_groups_lr(case):
    def groups(problem):
        return [{"params": [problem.weight]}, {"params": [problem.bias], "lr": 1e-2}]

    ours, optimizer, theirs, reference = both(case, groups, lr=1e-3)
    ours.train(optimizer, 20)
    theirs.train(reference, 20)
    ours.is_close_to(theirs)


@over(cases())
def test_param_groups_weight_decay(case):
    def groups(problem):
        return [{"params": [problem.weight]}, {"params": [problem.bias], "weight_decay": 0.5}]

    ours, optimizer, theirs, reference = both(case, groups, weight_decay=0)
    ours.train(optimizer, 20)
    theirs.train(reference, 20)
    ours.is_close_to(theirs)


@over(cases())
def test_tensor_lr(case):
    for rate in (torch.tensor(1e-2), torch.tensor([1e-2])):
        ours, theirs = Problem(), Problem()
        optimizer, reference = case.ours(ours.parameters, lr=rate.clone()), case.plain(theirs.parameters, lr=1e-2)
        ours.train(optimizer, 10, [StepLR(optimizer, 3, 0.5)])
        theirs.train(reference, 10, [StepLR(reference, 3, 0.5)])
        ours.is_close_to(theirs)
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
        optimizer.param_groups[0]["lr"].fill_(0.0)  # in place
        before = copy.deepcopy(ours.parameters)
        ours.train(optimizer, 1)
        assert_close(ours.parameters, before, rtol=0, atol=0)


@over(cases())
def test_step_is_noop_for_zero_grads(case):
    p = torch.randn(3, requires_grad=True)
    before = p.detach().clone()
    optimizer = case.ours([p], weight_decay=0)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p, before)


@over(cases())
def test_step_is_noop_when_params_have_no_grad(case):
    problem = Problem()
    before = copy.deepcopy(problem.parameters)
    case.ours(problem.parameters).step()
    assert_close(problem.parameters, before, rtol=0, atol=0)


@over(cases())
def test_grads_are_never_inplaced_into(case):
    problem = Problem()
    for p in problem.parameters:
        p.grad = torch.rand_like(p)
    optimizer = case.ours(problem.parameters)
    for _ in range(3):
        before = [p.grad.clone() for p in problem.parameters]
        optimizer.step()
        assert_close([p.grad for p in problem.parameters], before, rtol=0, atol=0)


@over(cases())
def test_grad_scaling(case):
    def steps(problem, optimizer, scaler):
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(problem.loss()).backward()
            if step == 3:
                problem.weight.grad[0, 0] = torch.inf
            if step == 4:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    ours, optimizer, theirs, reference = both(case)
    scalers = [torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=1) for _ in range(2)]
    assert steps(ours, optimizer, scalers[0]) == steps(theirs, reference, scalers[1])
    ours.is_close_to(theirs)


@over(cases())
def test_complex(case):
    p = torch.randn(5, 5, dtype=torch.complex64, requires_grad=True)
    optimizer = case.ours([p])
    p.grad = torch.randn_like(p)
    optimizer.step()


@over(cases())
def test_step_all_hooks(case):
    called = []
    problem = Problem()
    optimizer = case.ours(problem.parameters)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: called.append("all before")),
        optimizer.register_step_pre_hook(lambda *_: called.append("before")),
        optimizer.register_step_post_hook(lambda *_: called.append("after")),
        register_optimizer_step_post_hook(lambda *_: called.append("all after")),
    ]
    problem.train(optimizer, 1)
    for handle in handles:
        handle.remove()
    problem.train(optimizer, 1)
    assert sorted(called) == sorted(["all before", "before", "after", "all after"])
    assert called.index("before") < called.index("after") and called.index("all before") < called.index("all after")


# State


def assert_same_state(ours, theirs, **tolerance):
    assert ours["param_groups"] == theirs["param_groups"]
    assert_close(ours["state"], theirs["state"], **tolerance)


@over(cases())
def test_state_dict_deterministic(case):
    problem = Problem()
    optimizer = case.ours(problem.parameters)
    problem.train(optimizer, 5)
    other = copy.deepcopy(problem)
    successor = case.ours(other.parameters)
    saved = copy.deepcopy(optimizer.state_dict())
    given = copy.deepcopy(saved)
    successor.load_state_dict(given)
    problem.train(optimizer, 5)
    other.train(successor, 5)
    problem.is_close_to(other, rtol=0, atol=0)
    assert_same_state(given, saved, rtol=0, atol=0)
    assert_same_state(optimizer.state_dict(), successor.state_dict(), rtol=0, atol=0)


@over(cases())
def test_state_of_torch_goes_on_here(case):
    ours, optimizer, theirs, reference = both(case)
    theirs.train(reference, 5)
    with torch.no_grad():
        for p, q in zip(ours.parameters, theirs.parameters):
            p.copy_(q)
    optimizer.load_state_dict(reference.state_dict())
    ours.train(optimizer, 5)
    theirs.train(reference, 5)
    ours.is_close_to(theirs)


@over(cases())
def test_can_load_older_state_dict(case):
    problem = Problem()
    optimizer = case.ours(problem.parameters)
    problem.train(optimizer, 3)
    older = copy.deepcopy(optimizer.state_dict())
    for group, flag in itertools.product(older["param_groups"], case.info.not_og_supported_flags):
        group.pop(flag, None)
    optimizer.load_state_dict(older)
    reference = case.plain(Problem().parameters)
    reference.load_state_dict(older)
    for flag in set(case.info.not_og_supported_flags) & set(reference.param_groups[0]):
        assert bool(optimizer.param_groups[0][flag]) == bool(reference.param_groups[0][flag]) is False
    problem.train(optimizer, 1)


@over(cases())
def test_load_nontensor_step(case):
    problem = Problem()
    optimizer = case.ours(problem.parameters)
    problem.train(optimizer, 3)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        if "step" in state:
            state["step"] = state["step"].item()
    optimizer.load_state_dict(saved)
    problem.train(optimizer, 1)
    assert all(state.get("step", 4) == 4 for state in optimizer.state_dict()["state"].values())


@over(cases())
def test_save_load_equality_with_weights_only(case):
    problem = Problem()
    optimizer = case.ours(problem.parameters)
    problem.train(optimizer, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert_same_state(torch.load(file, weights_only=True), optimizer.state_dict(), rtol=0, atol=0)


@over(cases())
def test_state_dict_hooks(case):
    problem = Problem()
    optimizer = case.ours(problem.parameters)
    called = []
    optimizer.register_state_dict_pre_hook(lambda *_: called.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda *_: called.append("after saving"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda *_: called.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["before saving", "after saving", "before loading", "after loading"]


@over([c for c in cases() if c.name != "SGD" or c.arguments.get("momentum")])  # torch's SGD has none without
def test_non_empty_state(case):
    problem = Problem()
    optimizer = case.ours(problem.parameters)
    problem.train(optimizer, 1)
    assert len(optimizer.state) > 0


@over(cases())
def test_deepcopy_copies_all_public_attrs(case):
    copy.deepcopy(case.ours(Problem().parameters))


def test_every_row_of_the_table_is_met():
    assert met == set(BY_DESIGN) and all(BY_DESIGN.values())
