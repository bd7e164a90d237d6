"""overlap="backward": parameters are updated as their gradients become final, with the bits of steps that are awaited."""

import os
import signal
import warnings

import pytest
import torch

import plimsoll.torch
from gpt import batch
from plimsoll.client import Session
from plimsoll.torch import gradient_arena
from plimsoll.torch.overlap_backward import Backward
from test_crash import digest, kill_worker
from test_optimizer import backward, network
from test_overlap import DATA, FORMATS, ByParents, Words, gpt

BOTH_WAYS = True
TORN = "Only some of the parameters have had the step. To go on, load the last checkpoint"


@pytest.fixture(autouse=True)
def small_messages(monkeypatch):
    """The service hears of every gradient at once."""
    monkeypatch.setattr(gradient_arena, "_READY_BYTES", 64)


@pytest.fixture
def strict(monkeypatch):
    monkeypatch.setenv("PLIMSOLL_CHECK_OVERLAP", "1")


def make(model, overlap="backward", name="AdamW", **options):
    return getattr(plimsoll.torch, name)(model.parameters(), model=model, overlap=overlap, **{"lr": 1e-2, **options})


def has_begun(optimizer):
    return isinstance(optimizer._overlap, Backward) and optimizer._overlap.has_begun


def step(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def train(model, optimizer, count, first=0):
    for i in range(first, first + count):
        backward(model, i)
        step(optimizer)


def is_same(program, begins=True):
    """Whether a program ends with the same bits without overlap. It is a generator, and yields the optimizer between its
    last backward passes and steps.
    """
    found = []
    for overlap in (None, "backward"):
        torch.manual_seed(0)
        begun = [has_begun(optimizer) for optimizer in program(overlap, found)]
        assert overlap is None or any(begun) == begins
    return found[0] == found[1]


def ended(model, optimizer, found):
    state = optimizer.state_dict()["state"]  # waits
    found.append((digest(model), [v.tolist() if torch.is_tensor(v) else v for s in state.values() for v in s.values()]))
    optimizer.close()


@pytest.mark.each_choice
@pytest.mark.parametrize("named", FORMATS)
def test_same_bits(named, strict):
    name, dtype, options = FORMATS[named]

    def program(overlap, found):
        model = gpt(dtype)
        optimizer = make(model, overlap, name, **options)
        for i in range(int(os.environ.get("PLIMSOLL_OVERLAP_STEPS", 8))):
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            model.loss(batch(DATA, i)).backward()
            yield optimizer
            step(optimizer)
        ended(model, optimizer, found)

    assert is_same(program)


def layers(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(5))).to(dtype)


def wide(model, i, at_first=lambda: None):
    """A forward and a backward pass. Calls a function before the gradients of the first layer are there."""
    x = model[0](torch.randn(4, 256, generator=torch.Generator().manual_seed(i)).to(model[0].weight.dtype))
    x.register_hook(lambda gradient: at_first() and None)
    model[1:](x).float().square().mean().backward()


def test_parameters_change_before_the_backward_pass_ends():
    model = layers()
    optimizer = make(model)
    for i in range(2):
        wide(model, i)
        step(optimizer)
    optimizer.synchronize()
    weights = [optimizer._shards[0].slots[layer.weight].in_arena for layer in model]
    before = [weight.clone() for weight in weights]
    seen = []

    def look():
        slot = optimizer._shards[0].slots[model[4].weight]
        session = optimizer._shards[0].session
        session.waited(session.wait(slot.piece.offset, slot.piece.count))
        seen.append([weight.equal(old) for weight, old in zip(weights, before)])

    wide(model, 2, look)
    assert [seen[0][0], seen[0][4]] == [True, False]
    step(optimizer)
    optimizer.synchronize()
    assert not any(weight.equal(old) for weight, old in zip(weights, before))


# Programs of many kinds


def test_gradients_of_several_passes(strict):
    def program(overlap, found):
        model = network(torch.bfloat16)
        optimizer = make(model, overlap)
        for i in range(7):
            for j in range(1 if i == 4 else 2):  # the end of an epoch
                backward(model, 2 * i + j)
                # Nothing of the step has begun before the last pass.
                assert j == 1 or not has_begun(optimizer)
            yield optimizer
            step(optimizer)
        ended(model, optimizer, found)

    assert is_same(program)


def with_gradients_by(passes):
    """A program whose backward passes are all of one forward pass."""

    def program(overlap, found):
        model = network()
        optimizer = make(model, overlap)
        for i in range(5):
            passes(model, model(torch.randn(4, 16, generator=torch.Generator().manual_seed(i))))
            yield optimizer
            step(optimizer)
        ended(model, optimizer, found)

    return program


def test_graphs_that_are_kept_and_gradients_of_some_inputs(strict):
    def passes(model, out):
        out.square().sum().backward(retain_graph=True, inputs=[model[0].weight, model[0].bias])
        out.sum().backward(retain_graph=True, inputs=[model[0].weight])
        out[:, 0].sum().backward()

    assert is_same(with_gradients_by(passes))


def test_a_graph_of_which_a_part_is_used_after_its_gradients(way):
    def passes(model, out):
        out.square().sum().backward(retain_graph=True)
        out.sum().backward(inputs=[model[0].weight])  # through model[2], whose update has begun

    program = with_gradients_by(passes)
    if way == "copied":
        assert is_same(program)  # the model has its old parameters until the step
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            is_same(program)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_and_tied_weights(reentrant, strict):
    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer, self.head = torch.nn.Linear(16, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)
            self.other = torch.nn.Linear(32, 32)
            self.other.weight = self.layer.weight

        def block(self, x):
            return torch.tanh(self.other(torch.tanh(self.layer(x))))

        def forward(self, x):
            x = torch.utils.checkpoint.checkpoint(self.block, self.first(x), use_reentrant=reentrant)
            return self.head(torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=reentrant))

    def program(overlap, found):
        model = Shared()
        optimizer = make(model, overlap)
        for i in range(6):
            model(torch.randn(4, 16, generator=torch.Generator().manual_seed(i))).square().sum().backward()
            yield optimizer
            step(optimizer)
            with torch.no_grad():
                found.append(model.eval()(torch.ones(1, 16)).tolist()) if i == 5 else model(torch.ones(1, 16))
        del found[-1]
        ended(model, optimizer, found)

    assert is_same(program)


@pytest.mark.parametrize("kind", ["own", "tied", "by hand"])
def test_embeddings_and_parameters_that_are_read_by_hand(kind, strict):
    def program(overlap, found):
        model = Words(kind, vocabulary=4000)
        if kind == "by hand":
            del model.head
        optimizer = make(model, overlap, "SGD", momentum=0.9)
        for i in range(5):
            model.loss(i).backward()
            yield optimizer
            step(optimizer)
        ended(model, optimizer, found)

    assert is_same(program)


@pytest.mark.first_way
def test_compiled_models():
    def program(overlap, found):
        torch._dynamo.reset()
        model = network()
        optimizer = make(model, overlap)
        used = torch.compile(model, backend="aot_eager")
        for i in range(5):
            used(torch.randn(8, 16, generator=torch.Generator().manual_seed(i))).square().sum().backward()
            yield optimizer
            step(optimizer)
        ended(model, optimizer, found)

    assert is_same(program)


class Mixed(torch.nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(16, 40), torch.nn.Linear(40, 8).bfloat16(), torch.nn.Linear(8, 4))

    def forward(self, x):
        return self[2](self[1](self[0](x).bfloat16()).float())


def test_types_groups_and_weights_that_the_program_changes(strict):
    def program(overlap, found):
        model = Mixed()
        groups = [{"params": model[i].parameters(), "lr": 0.1**i} for i in range(3)]
        optimizer = plimsoll.torch.Adam(groups, maximize=True, model=model, overlap=overlap)
        for i in range(6):
            model(torch.randn(4, 16, generator=torch.Generator().manual_seed(i))).square().sum().backward()
            yield optimizer
            step(optimizer)
            optimizer.synchronize()
            with torch.no_grad():
                model[i % 3].weight.clamp_(-0.1, 0.1)
        ended(model, optimizer, found)

    assert is_same(program)


def test_hooks_that_change_gradients(strict):
    def triple(parameter):
        parameter.grad.mul_(3)

    def program(overlap, found):
        model = network(torch.bfloat16)
        model[0].weight.register_hook(lambda gradient: gradient * 2)
        model[2].weight.register_post_accumulate_grad_hook(triple)
        optimizer = make(model, overlap, "SGD")
        for i in range(5):
            backward(model, i)
            yield optimizer
            step(optimizer)
        ended(model, optimizer, found)

    assert is_same(program)


def test_missing_gradients_and_gradients_that_the_program_makes(strict):
    def program(overlap, found):
        model = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])
        optimizer = make(model, overlap, missing_gradients="zero")
        for i, used in enumerate((3, 3, 2, 3, 1)):
            sum(layer(torch.ones(4)).sum() for layer in model[:used]).backward()
            yield optimizer
            if used == 2:
                model[2].bias.grad = torch.full((4,), 0.5)
            step(optimizer)
        ended(model, optimizer, found)

    assert is_same(program)


def test_gradients_with_a_graph_are_taken_in_the_step(strict):
    def program(overlap, found):
        model = network()
        optimizer = make(model, overlap)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of create_graph
            for i in range(4):
                model(torch.ones(2, 16)).square().sum().backward(create_graph=True)
                yield optimizer
                step(optimizer)
        ended(model, optimizer, found)

    assert is_same(program, begins=False)


# Deaths


def test_the_service_is_killed_in_the_backward_pass(service):
    wanted, model = layers(), layers()
    serial, optimizer = make(wanted, None), make(model, socket=service.socket)
    killed = 0
    for i in range(10):
        wide(wanted, i)
        step(serial)

        def kill():
            nonlocal killed
            killed += has_begun(optimizer) and bool(kill_worker(service))

        wide(model, i, kill)
        step(optimizer)
    optimizer.synchronize()
    assert digest(model) == digest(wanted) and killed >= 4


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_child(program):
    trainer = os.fork()  # before there is any optimizer here
    if trainer == 0:
        try:
            program()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(trainer, 0)[1]) == -signal.SIGKILL


def trained(count, service, directory, at_first=lambda i: None, overlap="backward"):
    """Trains on from the last checkpoint of a folder, which it saves after two steps."""
    model = layers()
    optimizer = make(model, overlap, socket=service.socket if service else None)
    if directory and any(directory.iterdir()):
        optimizer.load(directory)
    first = optimizer.resumed_step
    for i in range(first, count):
        wide(model, i, lambda i=i: at_first(i))
        step(optimizer)
        if i == 1 and directory:
            optimizer.save(directory)
            optimizer.saved()
    optimizer.synchronize()
    return first, digest(model)


def test_the_trainer_is_killed_in_the_backward_pass(service, tmp_path):
    die_in_child(lambda: trained(9, service, tmp_path, lambda i: die() if i == 5 else None))
    with pytest.warns(UserWarning, match="died in the middle of step 6, before all gradients were there"):
        first, bits = trained(9, service, tmp_path)
    assert first == 2 and bits == trained(9, None, None, overlap=None)[1]


@pytest.mark.parametrize("when", ["between two parts", "after one part is whole"])
def test_the_trainer_is_killed_between_parts(when, service, way):
    def program():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256).bfloat16())
        return model, make(model, socket=service.socket)

    def die_after_one_part(optimizer):
        for session in optimizer._shards.sessions if way == "shared" else ():
            if "bf16" in session.document["part"]:  # its gradients are final, and the service hears of them
                session.waited(session.wait(0, session.elements))
        die()

    def run(model, optimizer, at=-1):
        for i in range(5):
            x = model[0](torch.ones(2, 256))
            if i == at and when != "between two parts":
                x.register_hook(lambda _: die_after_one_part(optimizer))
            elif i == at:
                begin = Session.begin
                Session.begin = lambda s, *a, **k: die() if "fp32" in s.document["part"] else begin(s, *a, **k)
            model[1](x.bfloat16()).float().square().sum().backward()
            step(optimizer)

    die_in_child(lambda: run(*program(), at=3))
    model, optimizer = program()
    if when == "between two parts" or way == "copied":
        optimizer.open()  # the step had changed nothing: the last copies were under way
        assert optimizer.resumed_step == 3
    else:
        with pytest.raises(RuntimeError, match="at different steps .3, 4., and not all prepared the last one"):
            optimizer.open()


# What is refused


def after_steps(directory, count=3, model=None, run=train, **options):
    """A model after some steps, the last two of which have begun early. Its state is saved."""
    model = model or network(torch.bfloat16)
    optimizer = make(model, **options)
    run(model, optimizer, count)
    optimizer.save(directory)
    optimizer.saved()
    return model, optimizer


def assert_torn(model, optimizer, directory, match, at_step=True):
    """Asserts that everything is refused, until the state is loaded."""
    calls = [optimizer.state_dict, optimizer.synchronize, optimizer.zero_grad, model.state_dict, lambda: optimizer.save(directory)]
    calls += [lambda: optimizer.load_state_dict({"state": {0: {}}, "param_groups": []}), lambda: backward(model, 9)]
    for call in [optimizer.step, *calls] if at_step else calls:
        with pytest.raises(RuntimeError, match=match + r".*Only some of the parameters have had the step. To go on, load"):
            call()
    optimizer.load(directory)
    model.zero_grad()
    first = optimizer.resumed_step
    train(model, optimizer, 3, first)
    wanted = network(torch.bfloat16)
    train(wanted, make(wanted, None, name="AdamW"), first + 3)
    optimizer.synchronize()
    assert digest(model) == digest(wanted)


def test_a_gradient_too_many(tmp_path):
    model, optimizer = after_steps(tmp_path)
    for i in range(2):  # both forward passes come before
        x = model[0](torch.ones(2, 16).bfloat16())
        model[2](x).sum().backward() if i else None
    with pytest.raises(RuntimeError, match="a forward pass reads parameter 0.weight, whose update has begun"):
        backward(model, 8)
    step(optimizer)  # nothing was lost
    optimizer.load(tmp_path)
    out = model[0](torch.ones(2, 16).bfloat16()), model[0](torch.ones(2, 16).bfloat16())
    (out[0].sum() + model[2](torch.ones(2, 40).bfloat16()).sum()).backward()
    with pytest.raises(RuntimeError, match="parameter 0.bias got a gradient more than the 1 that made its steps so far"):
        out[1].sum().backward()
    assert_torn(model, optimizer, tmp_path, "parameter 0.bias got a gradient more")


def test_a_backward_pass_that_fails(tmp_path):
    model, optimizer = after_steps(tmp_path)

    def fail(_):
        raise MemoryError("the device is full")

    x = model[0](torch.ones(2, 16).bfloat16())
    x.register_hook(fail)
    with pytest.raises(MemoryError):
        model[2](x).sum().backward()
    assert has_begun(optimizer)
    assert_torn(model, optimizer, tmp_path, "step 4 waits for the rest of its gradients", at_step=False)


def test_a_backward_pass_that_fails_before_a_step(tmp_path):
    model, optimizer = after_steps(tmp_path, missing_gradients="refuse")
    model[0](torch.ones(2, 16).bfloat16())
    model[2](torch.ones(2, 40).bfloat16()).sum().backward()
    with pytest.raises(RuntimeError, match="2 parameters have no gradient, 0.bias among them"):
        optimizer.step()
    assert_torn(model, optimizer, tmp_path, "2 parameters have no gradient, 0.bias among them")


CHANGES = {
    "gradient": (lambda m, o: m[2].weight.grad.mul_(2), "the gradient of parameter 2.weight was changed after it was accumulated"),
    "gradient's data": (lambda m, o: m[2].weight.grad.data.mul_(2), "the gradients of 1 parameters were written after the backward pass"),
    "hyperparameters": (lambda m, o: o.param_groups[0].update(lr=0.5), "the hyperparameters of param_groups were changed between"),
    "clipping": (lambda m, o: setattr(o, "max_grad_norm", 1.0), "max_grad_norm is 1.0, and the backward pass has begun the step without it"),
    "removed": (lambda m, o: setattr(m[2].weight, "grad", None), "the gradient of parameter 2.weight was removed"),
    "scaler": (lambda m, o: setattr(o, "found_inf", torch.zeros(1)), "there is a GradScaler, and the backward pass has begun the step without it"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_backward_and_step(change, tmp_path):
    changes, match = CHANGES[change]
    model, optimizer = after_steps(tmp_path)
    backward(model, 3)
    changes(model, optimizer)
    with pytest.raises(RuntimeError, match=match + ".*Step 4 had begun"):
        optimizer.step()
    optimizer.max_grad_norm = None
    optimizer.param_groups[0]["lr"] = 1e-2
    assert_torn(model, optimizer, tmp_path, match)


@pytest.mark.parametrize("change", [c for c in CHANGES if c in ("gradient", "hyperparameters")])
def test_changes_in_all_steps_are_refused_before_one_has_begun(change):
    changes, match = CHANGES[change]
    model = network(torch.bfloat16)
    optimizer = make(model)
    optimizer.open()
    before = digest(model)
    backward(model, 0)
    changes(model, optimizer)
    with pytest.raises(RuntimeError, match=match):
        optimizer.step()
    optimizer.max_grad_norm = None
    optimizer.zero_grad()
    optimizer.synchronize()
    assert digest(model) == before and optimizer._shards.step == 0
    train(model, optimizer, 3)


def test_clipping_by_a_factor_of_one_changes_nothing(tmp_path):
    """As the Trainer does with max_grad_norm=0: its clip_grad_norm_(inf) writes every gradient."""
    model, unclipped = network(torch.bfloat16), network(torch.bfloat16)
    optimizer, theirs = make(model), make(unclipped)
    for i in range(4):
        backward(model, i)
        torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        step(optimizer)
        backward(unclipped, i)
        step(theirs)
    for each in (optimizer, theirs):
        each.synchronize()
    assert digest(model) == digest(unclipped)
    backward(model, 4)
    assert has_begun(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="was changed after it was accumulated"):
        optimizer.step()


def test_a_torn_state_of_several_types(tmp_path):
    def run(model, optimizer, count, first=0):
        for i in range(first, first + count):
            model(torch.randn(4, 16, generator=torch.Generator().manual_seed(i))).square().sum().backward()
            step(optimizer)

    model, optimizer = after_steps(tmp_path, model=Mixed(), run=run)
    x = model[0](torch.ones(2, 16))
    x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model[2](model[1](x.bfloat16()).float()).sum().backward()
    with pytest.raises(RuntimeError, match=TORN):
        model(torch.ones(2, 16))
    optimizer.load(tmp_path)
    model.zero_grad()
    run(model, optimizer, 3, 3)
    wanted = Mixed()
    run(wanted, make(wanted, None), 6)
    optimizer.synchronize()
    assert digest(model) == digest(wanted)


def test_parameters_that_a_hook_reads_are_found_by_the_check_mode(strict):
    model = layers()
    optimizer = make(model)
    for i in range(3):
        wide(model, i, lambda: model[0].weight.sum())  # not changed yet
        step(optimizer)
    with pytest.raises(RuntimeError, match="sum uses parameter 4.weight, whose update is under way"):
        wide(model, 3, lambda: model[4].weight.sum())


def test_weights_that_are_written_during_the_backward_pass(tmp_path, way):
    model, optimizer = after_steps(tmp_path)
    x = model[0](torch.ones(2, 16).bfloat16())

    def write(_):
        with torch.no_grad():
            model[2].weight.mul_(2)

    x.register_hook(write)
    model[2](x).sum().backward()
    step(optimizer)
    with pytest.raises(RuntimeError, match="parameter 2.weight was written while the service updated it"):
        optimizer.synchronize()
    optimizer.load(tmp_path)


def test_calls_between_backward_and_step_are_refused_and_harm_nothing():
    def program(overlap, found):
        model = network(torch.bfloat16)
        optimizer = make(model, overlap)
        for i in range(5):
            backward(model, i)
            yield optimizer
            if overlap and i == 4:
                for call in (model.state_dict, optimizer.state_dict, optimizer.zero_grad, lambda: model(torch.ones(1, 16).bfloat16())):
                    with pytest.raises(RuntimeError, match=f"step 5 waits for the rest of its gradients: .*{TORN}"):
                        call()
                with pytest.raises(RuntimeError):
                    optimizer.state[model[0].weight]
            step(optimizer)
        ended(model, optimizer, found)

    assert is_same(program)


def test_closing_in_the_middle_warns():
    model = network()
    optimizer = make(model)
    train(model, optimizer, 2)
    backward(model, 2)
    with pytest.warns(UserWarning, match="closed in the middle of step 3"):
        optimizer.close()
    optimizer.open()
    train(model, optimizer, 3)


@pytest.mark.parametrize("missing", ["keep", "refuse"])
def test_parameters_that_are_read_without_waiting_or_frozen_are_refused_before_the_step(missing):
    model = ByParents()
    model.by_hand = False
    optimizer = make(model, missing_gradients=missing)

    def run(i):
        model(torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(i))).square().sum().backward()

    for i in range(3):
        run(i)
        step(optimizer)
    optimizer.synchronize()
    before = digest(model)
    model.by_hand = True
    says = {"refuse": "inner.bias .and 1 more. was read by no forward pass", "keep": "inner.* got a gradient, but no forward pass"}
    with pytest.raises(RuntimeError, match=f"parameter {says[missing]} of a module that owns it"):
        run(3)
    model.zero_grad()  # the optimizer does not hear of it
    assert digest(model) == before
    for i in range(3, 6):
        run(i)
        assert has_begun(optimizer)
        step(optimizer)
    optimizer.synchronize()
    before = digest(model)
    model.inner.weight.requires_grad_(False)
    if missing == "keep":
        run(6)
        step(optimizer)
        optimizer.synchronize()
        assert int(optimizer.state[model.inner.weight]["step"]) + 1 == int(optimizer.state[model.inner.bias]["step"])
        return
    with pytest.raises(RuntimeError, match="parameter inner.weight was frozen since the optimizer was opened"):
        run(6)
    assert digest(model) == before


def test_what_the_constructor_refuses(monkeypatch):
    model = network()
    for options, reason in [
        (dict(moments="int8"), "moments is 'int8'"), (dict(state="split24"), "state is 'split24'"),
        (dict(name="Lion"), "the optimizer is neither AdamW nor Adam"),
    ]:
        with pytest.raises(ValueError, match=f"overlap is 'backward', and max_grad_norm is 1.0, but {reason}: then a step cannot be"):
            make(model, max_grad_norm=1.0, **options)
    with pytest.raises(ValueError, match="overlap is 'backward', which takes gradients in the backward pass, but gradients is 'step'"):
        make(model, gradients="step")
    with pytest.raises(ValueError, match="overlap is 'backward', but there is no model"):
        plimsoll.torch.AdamW(model.parameters(), overlap="backward")
    with pytest.raises(ValueError, match="overlap is 'backward', but sharding is 'zero1'"):
        make(model, sharding="zero1")
    optimizer = make(model)
    monkeypatch.setattr(plimsoll.torch.shards.layout.Mesh, "size", 2)
    with pytest.raises(ValueError, match="overlap is 'backward', but several ranks hold the state"):
        optimizer.open()
