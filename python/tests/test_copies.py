"""Parameters that are not in shared memory: gradients and parameters are copied, later than asked for."""

import copy
import ctypes
import random

import pytest
import torch
from torch.nn import functional as F

import plimsoll.torch
from plimsoll.torch import gradient_arena
from plimsoll.torch.parameter_arena import ParameterArena
from plimsoll.torch.layout import Ranges
from test_optimizer import assert_same, backward, data, network, train
from transfers import PromptTransfer, use_copies


@pytest.fixture
def copies(monkeypatch):
    use_copies(monkeypatch)


@pytest.mark.each_choice
@pytest.mark.parametrize("sharding", [None, "zero2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_as_shared(monkeypatch, request, dtype, sharding):
    wanted, found = network(dtype), network(dtype)
    for model in (wanted, found):
        if model is found:
            request.getfixturevalue("copies")
        optimizer = plimsoll.torch.AdamW(
            model.parameters(), lr=1e-2, max_grad_norm=0.1, sharding=sharding if model is found else None
        )
        optimizer.open()
        norms = []
        for i in range(12):
            # The number of backward passes changes: what was expected is wrong at times.
            for j in range(1 + i // 3 % 3):
                backward(model, 10 * i + j)
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.last_grad_norm)
        if model is wanted:
            expected = norms
    assert norms == expected
    assert_same(found, wanted, 0, 0)


def test_changed_gradients_are_copied_again(copies):
    ours, theirs = network(), network()
    optimizer = plimsoll.torch.AdamW(ours.parameters(), lr=1e-2, max_grad_norm=1e9)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    optimizer.open()
    for i in range(5):
        for model in (ours, theirs):
            backward(model, i)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            model[2].weight.grad = model[2].weight.grad * 0.5
        optimizer.step(), reference.step()
        assert optimizer.last_grad_norm < 0.05
        optimizer.zero_grad(), reference.zero_grad()
    assert_same(ours, theirs)


def tensor_at(address, values):
    """A new tensor with these values, in the memory of one that is gone."""
    memory = (ctypes.c_char * values.nbytes).from_address(address)
    tensor = torch.frombuffer(memory, dtype=values.dtype).view(values.shape)
    tensor.data.copy_(values)
    return tensor


def test_another_gradient_at_the_same_address_is_copied(copies, monkeypatch):
    """As that which a program makes of the gradients of several losses, when the last one's memory is free again."""
    use_copies(monkeypatch, PromptTransfer)  # which holds no gradient
    ours, theirs = network(), network()
    optimizer = plimsoll.torch.AdamW(ours.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    optimizer.open()
    memory = []  # which is free for nobody else
    for i in range(6):
        for model in (ours, theirs):
            backward(model, i)
            for p in model.parameters():
                halved, address, version = p.grad / 2, p.grad.data_ptr(), p.grad._version
                memory.append(p.grad.untyped_storage())
                p.grad = None
                p.grad = tensor_at(address, halved)
                assert (p.grad.data_ptr(), p.grad._version) == (address, version)
        optimizer.step(), reference.step()
        optimizer.zero_grad(), reference.zero_grad()
    assert_same(ours, theirs)


@pytest.mark.parametrize("sharding", [None, "zero2"])
def test_discarded_gradients_do_not_come_back(copies, sharding):
    ours, theirs = network(), network()
    optimizer = plimsoll.torch.AdamW(ours.parameters(), lr=1e-2, max_grad_norm=1.0, sharding=sharding, missing_gradients="refuse")
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    optimizer.open()
    for i in range(4):
        for j in range(i):
            backward(ours, 100 + i + j)
        if i == 2:
            list(ours.parameters())[0].requires_grad_(False)
            optimizer.zero_grad()
            backward(ours, 200)
            with pytest.raises(RuntimeError, match="1 parameters have no gradient"):
                optimizer.step()
            list(ours.parameters())[0].requires_grad_(True)
        optimizer.zero_grad()
        backward(ours, i), backward(theirs, i)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step(), reference.step()
        optimizer.zero_grad(), reference.zero_grad()
    assert_same(ours, theirs)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("way", ["shared", "copied", "zero2"])
def test_gradients_with_a_graph(request, way):
    """The program may go through it once more, and it is gone after the step."""
    if way == "copied":
        request.getfixturevalue("copies")
    ours, theirs = network(), network()
    optimizer = plimsoll.torch.SGD(ours.parameters(), lr=1e-2, sharding="zero2" if way == "zero2" else None)
    optimizer.open()
    reference = torch.optim.SGD(theirs.parameters(), lr=1e-2)
    for i in range(5):
        for model, its in ((ours, optimizer), (theirs, reference)):
            x, y = data(i)
            F.cross_entropy(model(x), y).backward(create_graph=True)
            if way != "zero2":
                penalty = sum(p.grad.square().sum() for p in model.parameters())
                its.zero_grad()
                penalty.backward(create_graph=i % 2 == 0)
            its.step()
            its.zero_grad(set_to_none=i % 2 == 0 or model is theirs)
        assert not any(
            s.gradient.requires_grad or (s.shown is not None and s.shown.requires_grad)
            for s in optimizer._shards[0].slots.values()
        )
    assert_same(ours, theirs)


@pytest.mark.each_choice
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("sharding", [None, "zero2"])
def test_any_order_of_gradients(copies, monkeypatch, sharding, late):
    """Some are there and some are not, accumulate, are changed, and are discarded."""
    monkeypatch.setattr(gradient_arena, "_REDUCING_BYTES", 0)
    if not late:
        use_copies(monkeypatch, PromptTransfer)
    numbers = random.Random(0)
    ours = [torch.nn.Parameter(torch.ones(numbers.randint(1, 8))) for _ in range(12)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = plimsoll.torch.SGD(ours, lr=0.1, sharding=sharding, missing_gradients="zero", max_grad_norm=0.1)
    optimizer.open()
    reference = torch.optim.SGD(theirs, lr=0.1)
    for _ in range(300):
        order, factor, what = numbers.sample(range(12), numbers.randint(1, 12)), numbers.random(), numbers.random()
        for parameters in (ours, theirs):
            sum((parameters[i] * factor).sum() for i in order).backward()
            if sharding is None and what > 0.8:
                torch.nn.utils.clip_grad_norm_(parameters, 0.2)
        if what < 0.3:
            continue
        if what > 0.5:
            norm = torch.nn.utils.clip_grad_norm_(theirs, 0.1)
            optimizer.step(), reference.step()
            assert optimizer.last_grad_norm == pytest.approx(norm.item(), rel=1e-5)
            for p, q in zip(ours, theirs):
                torch.testing.assert_close(p, q)
        optimizer.zero_grad(), reference.zero_grad()


def test_zero_comes_after_a_discarded_gradient(copies):
    """A gradient is on its way when it is discarded, and none takes its place: it counts as zero."""
    ours, theirs = network(), network()
    optimizer = plimsoll.torch.AdamW(ours.parameters(), lr=1e-2, missing_gradients="zero")
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    optimizer.open()
    for i in range(6):
        for model in (ours, theirs):
            backward(model, i)
        for parameter in list(ours.parameters())[i % 2 :: 2]:
            parameter.grad = None
        for parameter in list(theirs.parameters())[i % 2 :: 2]:
            parameter.grad.zero_()
        optimizer.step(), reference.step()
        optimizer.zero_grad(), reference.zero_grad()
    assert_same(ours, theirs)


@pytest.mark.each_choice
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("options", [{}, {"state": "fp32"}, {"moments": "bf16"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_the_program_changes_are_taken(request, tmp_path, dtype, options, copied):
    """Also where the state has them elsewhere, and all bits of those that it has left as they were."""
    if copied:
        request.getfixturevalue("copies")
    ours, wanted = network(dtype), network(dtype)
    optimizer = plimsoll.torch.AdamW(ours.parameters(), lr=1e-3, **options)
    train(ours, optimizer, 3)
    state = optimizer.state_dict()["state"]

    other = copy.deepcopy(ours).requires_grad_(False)
    other[0].weight[3] = torch.linspace(-1, 1, 16)
    other[2].bias.fill_(0.125)
    ours.load_state_dict(other.state_dict())
    changed = optimizer.state_dict()["state"]
    for i, (p, q) in enumerate(zip(ours.parameters(), other.parameters())):
        assert torch.equal(p, q)
        if dtype is not torch.float32:
            was, now = state[i]["master_weights"], changed[i]["master_weights"]
            kept = torch.ones_like(was, dtype=torch.bool)
            if i in (0, 3):
                kept[3 if i == 0 else slice(None)] = False
            assert torch.equal(now[kept], was[kept]) and torch.equal(now.to(dtype), q)

    # A step goes on from there, and a checkpoint has them.
    wanted.load_state_dict(other.state_dict())
    successor = plimsoll.torch.AdamW(wanted.parameters(), lr=1e-3, **options)
    successor.load_state_dict({**optimizer.state_dict(), "state": changed})
    assert train(ours, optimizer, 3, 3) == train(wanted, successor, 3, 3)
    assert_same(ours, wanted, 0, 0)
    ours.load_state_dict(other.state_dict())
    optimizer.save(tmp_path)
    optimizer.saved()
    optimizer.load(tmp_path)
    assert_same(ours, other, 0, 0)


def test_a_step_that_is_interrupted_between_blocks_is_made(copies, monkeypatch):
    ours, theirs = network(), network()
    optimizer = plimsoll.torch.AdamW(ours.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    optimizer.open()
    place = ParameterArena._place
    for i in range(5):
        backward(ours, i), backward(theirs, i)
        blocks = iter(range(2 * i))

        def interrupted(*arguments):
            if next(blocks, None) is None:
                monkeypatch.setattr(ParameterArena, "_place", place)
                raise KeyboardInterrupt
            place(*arguments)

        monkeypatch.setattr(ParameterArena, "_place", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        reference.step()
        assert_same(ours, theirs)
        optimizer.zero_grad(), reference.zero_grad()


def test_state_is_attached_to(copies, service):
    model = network()
    train(model, plimsoll.torch.AdamW(model.parameters(), socket=service.socket), 3)
    again = network()
    optimizer = plimsoll.torch.AdamW(again.parameters(), socket=service.socket)
    assert optimizer.resumed_step == 3
    assert_same(again, model, 0, 0)


def test_zero2_must_be_open_before_the_first_gradient():
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters(), sharding="zero2")
    backward(model, 0)
    with pytest.raises(RuntimeError, match="call optimizer.open\\(\\) before the first backward pass"):
        optimizer.step()


def test_ranges_are_joined():
    generator = torch.Generator().manual_seed(0)
    for enough in (1, 7, 30, 1000):
        ranges, out = Ranges(enough), []
        pieces = torch.randint(1, 9, (40,), generator=generator).tolist()
        firsts = [sum(pieces[:i]) for i in range(len(pieces))]
        for i in torch.randperm(40, generator=generator).tolist():
            joined = ranges.add(firsts[i], pieces[i])
            out += [joined] if joined else []
        assert all(count >= enough for _, count in out)
        out += ranges.rest()
        covered = sorted(x for first, count in out for x in range(first, first + count))
        assert covered == list(range(sum(pieces)))
        assert ranges.rest() == []
        if enough == 1000:
            assert out == [(0, sum(pieces))]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sharding", [None, "zero2"])
def test_cuda_as_cpu(dtype, sharding):
    on_cpu = network(dtype)
    on_gpu = copy.deepcopy(on_cpu).cuda()
    optimizers = [
        plimsoll.torch.AdamW(on_cpu.parameters(), lr=1e-2, max_grad_norm=1.0),
        plimsoll.torch.AdamW(on_gpu.parameters(), lr=1e-2, max_grad_norm=1.0, sharding=sharding),
    ]
    for optimizer in optimizers:
        optimizer.open()
    for i in range(20):
        # The gradients of the CPU, so that both see the same.
        gradients = []
        backward(on_cpu, i)
        gradients = [p.grad.clone() for p in on_cpu.parameters()]
        sum((p * g.cuda()).float().sum() for p, g in zip(on_gpu.parameters(), gradients)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert optimizers[0].last_grad_norm == optimizers[1].last_grad_norm
    for p, q in zip(on_gpu.parameters(), on_cpu.parameters()):
        assert torch.equal(p.cpu(), q)
    optimizers[1].close()
