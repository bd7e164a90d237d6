"""Programs that keep a gradient over zero_grad, as gradient surgery does: torch makes a new tensor for the next one."""

import pytest
import torch

import plimsoll.torch
from test_optimizer import assert_same, backward, network

BOTH_WAYS = True


def kept_by_name(parameter):
    return parameter.grad


def kept_as_view(parameter):
    return parameter.grad.t().detach()


def kept_as_data(parameter):
    return parameter.grad.data


def surgery(library, model, keep=kept_by_name):
    """Adds up the gradients of two losses, of which the program has kept the first."""
    optimizer = library.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for i in range(4):
        optimizer.zero_grad()
        backward(model, i)
        first = [keep(p) for p in model.parameters()]
        before = [g.clone() for g in first]
        optimizer.zero_grad()
        backward(model, i + 50)
        assert all(torch.equal(g, b) for g, b in zip(first, before)), "the next gradient has overwritten the one that was kept"
        for parameter, gradient in zip(model.parameters(), first):
            parameter.grad = parameter.grad + (gradient.t() if keep is kept_as_view else gradient)
        optimizer.step()


@pytest.mark.parametrize("keep", [kept_by_name, kept_as_view, kept_as_data])
def test_kept_gradients_stay(service, keep):
    ours, theirs = network(), network()
    surgery(plimsoll.torch, ours, keep)
    surgery(torch.optim, theirs, keep)
    assert_same(ours, theirs, rtol=1e-4)


def test_gradients_kept_over_steps(service):
    model = network()
    optimizer = plimsoll.torch.SGD(model.parameters(), lr=0.1, missing_gradients="zero")
    kept = []
    for i in range(3):
        backward(model, i)
        kept.append([(g, g.clone()) for p in model.parameters() for g in (p.grad, p.grad[:2])])
        optimizer.step()
        optimizer.zero_grad()
    model[0].requires_grad_(False)  # its gradient counts as zero, and is zero in the arena
    backward(model, 3)
    optimizer.step()
    assert all(torch.equal(gradient, then) for gradients in kept for gradient, then in gradients)


def test_gradient_given_back(service):
    """The program assigns a gradient that it has kept, and the step takes that."""
    ours, theirs = network(), network()
    for library, model in ((plimsoll.torch, ours), (torch.optim, theirs)):
        optimizer = library.SGD(model.parameters(), lr=0.1)
        backward(model, 0)
        kept = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
        backward(model, 1)
        for parameter, gradient in zip(model.parameters(), kept):
            parameter.grad = gradient
        optimizer.step()
    assert_same(ours, theirs)


def test_gradients_that_nobody_keeps_stay_in_place(service):
    model = network()
    optimizer = plimsoll.torch.SGD(model.parameters(), lr=0.1)
    places = []
    for i in range(4):
        backward(model, i)
        optimizer.step()
        places.append([p.grad.data_ptr() for p in model.parameters()])
        optimizer.zero_grad()
    if optimizer._shards[0].group.shared:
        assert places[1] == places[2] == places[3]
