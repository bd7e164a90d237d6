"""What the constructors of optimizers take, refuse and do with it."""

import copy
import math

import pytest
import torch

import plimsoll.torch
from plimsoll import PlimsollError, ServiceError
from test_optimizer import assert_same, backward, network, train

pytestmark = pytest.mark.usefixtures("one_service")

NAMES = [n for n in plimsoll.torch.__all__ if hasattr(getattr(plimsoll.torch, n), "zero_grad") and n not in ("Muon", "StateOffload")]


def make(name, model, /, **options):
    return getattr(plimsoll.torch, name)(model.parameters(), **options)


def bits(model, optimizer):
    entries = optimizer.state_dict()["state"].values()
    return [p.detach().clone() for p in model.parameters()] + [v for e in entries for v in e.values()]


def assert_equal(a, b):
    assert len(a) == len(b) and all(map(torch.equal, a, b))


def test_arguments_by_position():
    """The fifth of Adagrad's is what the sums begin with, as in torch."""
    parameters = list(network().parameters())
    for name, values in (
        ("Adagrad", (0.1, 0.2, 0.3, 0.4, 0.5)),
        ("SGD", (0.1, 0.2, 0.3, 0.4)),
        ("AdamW", (0.1, (0.2, 0.3), 0.4, 0.5)),
    ):
        ours, theirs = (getattr(module, name)(parameters, *values) for module in (plimsoll.torch, torch.optim))
        assert ours.defaults == theirs.defaults


# Maximizing


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_maximizing_is_minimizing_the_negative(name, dtype, moments):
    """To the bit. PyTorch's database holds it against torch, with weight decay, which is not negated."""
    if moments == "int8" and not name.startswith("Adam"):
        return
    ours, theirs = network(dtype), network(dtype)
    optimizer, reference = make(name, ours, moments=moments, maximize=True), make(name, theirs, moments=moments)
    for i in range(3):
        backward(ours, i)
        backward(theirs, i, scale=-1.0)
        optimizer.step(), reference.step()
        optimizer.zero_grad(), reference.zero_grad()
    assert_equal(bits(ours, optimizer), bits(theirs, reference))


def test_maximizing_with_clipping_and_two_types():
    """Steps of two parts are prepared, and clipped by one norm."""
    ours, theirs = network(), network()
    for model in (ours, theirs):
        model[2].bfloat16()
    optimizer, reference = (
        make("AdamW", model, weight_decay=0.1, max_grad_norm=0.1, maximize=model is ours) for model in (ours, theirs)
    )
    for model, sign in ((ours, 1.0), (theirs, -1.0)):
        for p in model.parameters():
            p.grad = torch.full_like(p, sign)
    optimizer.step(), reference.step()
    assert_equal(bits(ours, optimizer), bits(theirs, reference))
    assert optimizer.last_grad_norm == reference.last_grad_norm > 0.1


@pytest.mark.parametrize("option", ["maximize", "decoupled_weight_decay"])
def test_parameter_groups_agree(option):
    weight, bias = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    with pytest.raises(ValueError, match=f"{option} is True in some parameter groups and False in others"):
        plimsoll.torch.Adam([{"params": [weight], option: True}, {"params": [bias]}])
    optimizer = plimsoll.torch.Adam([{"params": [weight]}, {"params": [bias]}])
    weight.grad, bias.grad = torch.ones(3), torch.ones(3)
    optimizer.param_groups[1][option] = True
    with pytest.raises(ValueError, match=f"{option} is True in some parameter groups"):
        optimizer.step()
    assert weight.tolist() == [1.0] * 3


# Adam and AdamW


def test_decoupled_weight_decay_makes_adam_adamw():
    ours, theirs = network(), network()
    optimizer = make("Adam", ours, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True)
    reference = make("AdamW", theirs, lr=1e-2, weight_decay=0.1)
    train(ours, optimizer, 3)
    train(theirs, reference, 3)
    assert_equal(bits(ours, optimizer), bits(theirs, reference))


def test_a_state_of_adamw_is_not_one_of_adam():
    model = network()
    reference = torch.optim.AdamW(model.parameters())
    train(model, reference, 2)
    optimizer = make("Adam", model)
    with pytest.raises(ValueError, match="the parameter groups say adamw now, but the state is one of adam"):
        optimizer.load_state_dict(reference.state_dict())
    assert optimizer.state_dict()["state"] == {} and not optimizer.param_groups[0]["decoupled_weight_decay"]
    as_adamw = make("Adam", model, decoupled_weight_decay=True, weight_decay=1e-2)
    as_adamw.load_state_dict(reference.state_dict())
    other = copy.deepcopy(model)
    successor = torch.optim.AdamW(other.parameters())
    successor.load_state_dict(reference.state_dict())
    train(model, as_adamw, 2)
    train(other, successor, 2)
    assert_same(model, other)


# Adagrad's sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_begin_with_the_initial_value_of_their_group(dtype):
    weight, bias = (torch.nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    groups = [{"params": [weight]}, {"params": [bias], "initial_accumulator_value": 2.0}]
    optimizer = plimsoll.torch.Adagrad(groups, initial_accumulator_value=0.5)
    weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert state[0]["sum"].tolist() == [1.5] * 3 and state[1]["sum"].tolist() == [3.0] * 3
    # A state that lacks an entry begins anew with it.
    del state[1]
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    assert optimizer.state_dict()["state"][1]["sum"].tolist() == [2.0] * 3


# What is refused, and when


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(lr=-1.0), "Invalid learning rate: -1.0"),
        (dict(lr=1e39), "lr is 1e\\+39: expected a magnitude of at most"),
        (dict(lr=math.inf), "lr is inf"),
        (dict(lr=torch.tensor(1e39, dtype=torch.float64)), "lr is 1e\\+39"),
        (dict(betas=(0.9, 1.0)), "Invalid beta parameter at index 1"),
        (dict(eps=1e-60), "eps is 1e-60: expected 0, or at least 1.18e-38, as steps compute in fp32"),
        (dict(weight_decay=1e300), "weight_decay is 1e\\+300"),
        (dict(amsgrad=True), "there is no amsgrad in AdamW here: it needs a third moment.*StateOffload can keep on the host$"),
        (dict(amsgrad=True, differentiable=True), "there is no differentiable in AdamW here: .* an optimizer of torch$"),
        (dict(differentiable=True), "there is no differentiable in AdamW here: autograd cannot follow"),
    ],
)
def test_hyperparameters_are_checked_by_the_constructor(options, message):
    parameters = list(network().parameters())
    with pytest.raises(ValueError, match=message):
        plimsoll.torch.AdamW(parameters, **options)
    with pytest.raises(ValueError, match=f"parameter group 1: .*{message}"):
        plimsoll.torch.AdamW([{"params": parameters[:1]}, {"params": parameters[1:], **options}])


def test_hyperparameters_of_other_optimizers_are_checked_by_the_constructor():
    for name, options, message in (
        ("SGD", dict(nesterov=True), "Nesterov momentum requires a momentum and zero dampening"),
        ("SGD", dict(momentum=math.nan), "momentum is nan"),
        ("SGD", dict(dampening=-math.inf), "dampening is -inf"),
        ("Adagrad", dict(initial_accumulator_value=-1.0), "Invalid initial_accumulator_value value: -1.0"),
        ("Adagrad", dict(lr_decay=1e39), "lr_decay is 1e\\+39"),
        ("Lion", dict(betas=(1.5, 0.9)), "Invalid beta parameter at index 0"),
        ("Lion", dict(moments="int8"), "moments is 'int8': expected one of 'fp32', 'bf16'"),
    ):
        with pytest.raises(ValueError, match=message):
            make(name, network(), **options)
    with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):
        make("SGD", network(), fused=True, foreach=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'amsgrd'"):
        make("AdamW", network(), amsgrd=False)


def test_types_are_checked_by_the_constructor():
    model = network()
    model[2].double()
    with pytest.raises(TypeError, match="parameter 2.weight is torch.float64: expected bfloat16, float16 or float32"):
        make("AdamW", model, model=model)
    for p in model[2].parameters():
        p.requires_grad_(False)  # it is never updated
    make("AdamW", model)


def test_the_program_is_looked_for_by_the_constructor(monkeypatch, service):
    monkeypatch.setenv("PLIMSOLL", "/nowhere/plimsoll")
    with pytest.raises(PlimsollError, match="the program /nowhere/plimsoll was not found"):
        make("SGD", network())
    make("SGD", network(), socket=service.socket)  # which needs none


def test_a_group_that_is_refused_is_not_added():
    optimizer = make("AdamW", network())
    with pytest.raises(ValueError, match="parameter group 1: Invalid learning rate"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": -1})
    assert len(optimizer.param_groups) == 1


def test_a_state_with_flags_that_are_refused_changes_nothing():
    model = network()
    reference = torch.optim.AdamW(model.parameters(), lr=0.5, amsgrad=True)
    optimizer = make("AdamW", model)
    for steps in (0, 1):
        train(model, reference, steps)
        with pytest.raises(ValueError, match="there is no amsgrad in AdamW here"):
            optimizer.load_state_dict(reference.state_dict())
        assert optimizer.param_groups[0]["lr"] == 1e-3 and optimizer.state_dict()["state"] == {}


# Numbers that fp32 cannot hold, in a step


def test_numbers_that_overflow_together_are_refused_by_the_service():
    model = network()
    optimizer = make("AdamW", model, lr=1e30, weight_decay=1e30)
    before = copy.deepcopy(model)
    with pytest.raises(ServiceError, match="group 0, .*: the weight decay times the learning rate is -1e\\+60: updates are in"):
        train(model, optimizer, 1)
    assert_same(model, before, 0, 0)
    optimizer.param_groups[0].update(lr=1e-3, weight_decay=0.1)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 1


@pytest.mark.parametrize("scale", [0.0, 1e-39, 1e38, math.nan])
def test_a_scale_that_fp32_cannot_divide_by_is_refused(scale):
    model = network()
    optimizer = make("AdamW", model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    backward(model, 0)
    scaler.scale(torch.ones(()))
    scaler._scale.fill_(scale)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match="the scale of the GradScaler is .*: expected 5.88e-39 to 8.51e\\+37"):
        scaler.step(optimizer)
    assert_same(model, before, 0, 0)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 1


def test_a_factor_that_fp32_cannot_hold_is_refused():
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = plimsoll.torch.SGD([weight], lr=0.1, max_grad_norm=1e-10)
    weight.grad = torch.full((8,), 1e30)
    with pytest.raises(ValueError, match="the norm of all gradients is 2.8.*e\\+30, and max_grad_norm is 1e-10: fp32 cannot"):
        optimizer.step()
    assert weight.tolist() == [1.0] * 8
    optimizer.max_grad_norm = 1.0
    optimizer.step()
    assert weight[0].item() == pytest.approx(1 - 0.1 / math.sqrt(8))
