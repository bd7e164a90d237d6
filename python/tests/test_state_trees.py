"""States as trees: containers, objects, and what is beside the state of parameters."""

import collections
import functools
from contextlib import closing

import pytest
import torch

from plimsoll.torch import StateOffload
from plimsoll.torch.documents import decode, encode
from plimsoll.torch.tree import Uncarried, flatten, is_same, rebuild
from test_state_offload_optimizers import Rule, wrap
from wrapping import parameters, steps

Pair = collections.namedtuple("Pair", "first second")


class Basis:
    def __init__(self, matrix):
        self.matrix, self.age, self.name = matrix, 0, "basis"


def tree():
    shared = torch.ones(3)
    basis = Basis(torch.zeros(2, 2))
    basis.itself = basis
    return {
        "list": [shared, (1, 2.5), None],
        "dict": collections.OrderedDict({0.9: torch.zeros(2), "again": shared, "none": {}}),
        "object": basis,
        "pair": Pair(True, torch.float32),
        "set": {"a", "b"},
        "grows": collections.deque([1, 2], maxlen=4),
        "default": collections.defaultdict(list, {"k": [3]}),
    }


def test_a_tree_is_rebuilt():
    values = tree()
    flat = flatten(values)
    assert set(flat.leaves) >= {"list.0", "list.1.1", "dict.0.9", "object.matrix", "object.age", "pair.0"}
    assert "dict.again" not in flat.leaves  # it is the first of the list
    found = rebuild(flat.nodes, flat.leaves)
    assert is_same(found, values)
    assert found["dict"]["again"] is found["list"][0] and found["object"].itself is found["object"] is not values["object"]
    assert found["grows"].maxlen == 4 and found["default"]["new"] == [] and type(found["pair"]) is Pair
    found["object"].age = 1
    assert not is_same(found, values)


def test_what_is_no_tree_is_refused():
    memory = torch.zeros(10)
    for values, message in [
        ({"a": [object()]}, "'a.0' is an object"),
        ({"a": functools.partial(print)}, "'a' is a partial"),
        ({"a": {torch.zeros(1): 1}}, "'a' is a dict with parameters for keys"),
        ({"a": memory[:6], "b": memory[4:]}, "'b' is in the memory of a"),
        ({"a": {"b": 1}, "a.b": 2}, "'a.b' is the name of two parts"),
    ]:
        with pytest.raises(Uncarried, match=message):
            flatten(values)
    assert flatten({"a": memory[:5], "b": memory[5:]}).leaves.keys() == {"a", "b"}


def test_numbers_go_through_json():
    values = [None, True, 3, 2.5, float("inf"), float("nan"), "text", torch.bfloat16, (1, [2]), {1: "a"}, {"b"}, torch.tensor([1.5, 2]).bfloat16()]
    values += [torch.tensor(7), torch.zeros(0, 3), collections.deque([1], maxlen=3), collections.OrderedDict(a=1)]
    for value in values:
        found = decode(encode(value, "x"), torch.device("cpu"))
        assert is_same(found, value) and type(found) is type(value)
    for value, what in [(torch.zeros(2000), "a tensor of"), (object(), "an object"), ({torch.zeros(1): 1}, "a dict with parameters for keys")]:
        with pytest.raises(Uncarried, match=what):
            encode(value, "x")


class Trees(Rule):
    """Has its state in a list, a dict and an object, and beside it in its groups, in itself and under a name."""

    total = 0

    def begin(self):
        self.total += 1
        self.state.setdefault("k", torch.zeros(1)).add_(1)
        for group in self.param_groups:
            group["seen"] = {"short": 0.5 * group.get("seen", {"short": 1.0})["short"]}

    def update(self, p, group, state):
        if not state:
            state.update(sums=[torch.zeros_like(p), {0.9: torch.zeros_like(p)}], basis=Basis(torch.ones_like(p)), steps=(0,))
        first, second = state["sums"][0], state["sums"][1][0.9]
        first.add_(p.grad)
        second.mul_(0.9).add_(first)
        basis = state["basis"]
        basis.matrix, basis.age, state["steps"] = basis.matrix * 0.5 + second, basis.age + 1, (state["steps"][0] + 1,)
        return basis.matrix / (self.total + self.state["k"] + group["seen"]["short"] + basis.age)


def assert_same_training(ours, theirs, ps, qs):
    assert all(map(torch.equal, ps, qs)) and ours._wrapped.optimizer.total == theirs.total
    found, expected = ours.state_dict(), theirs.state_dict()
    assert found["state"].keys() == expected["state"].keys() and found["param_groups"] == expected["param_groups"]
    assert all(is_same(entry, expected["state"][key]) for key, entry in found["state"].items())


@pytest.mark.parametrize("mode", ["chunked", "whole"])
def test_training_and_checkpoints(mode, tmp_path):
    ps, qs = parameters(), parameters()
    theirs = Trees(qs, lr=0.1)
    with closing(wrap(Trees(ps, lr=0.1), mode=mode)) as ours:
        steps(ps, ours, 3)
        steps(qs, theirs, 3)
        assert_same_training(ours, theirs, ps, qs)
        assert ours.state["k"] == 3 and ours.state[ps[0]]["basis"].age == 3
        ours.save(tmp_path)
        ours.saved()
        steps(ps, ours, 2, 3)
        steps(qs, theirs, 2, 3)
        ours.load(tmp_path)  # back
        steps(ps, ours, 2, 3)
        assert_same_training(ours, theirs, ps, qs)
    rs = parameters()
    with closing(wrap(Trees(rs, lr=0.1), mode=mode)) as ours:
        assert ours.load(tmp_path) is None and ours.resumed_step == 3
        steps(rs, ours, 2, 3)
        assert_same_training(ours, theirs, rs, qs)


def test_checkpoints_of_other_groups_are_refused(tmp_path):
    ps, qs = parameters(), parameters()
    with closing(wrap(torch.optim.AdamW(ps), named_parameters=[(str(i), p) for i, p in enumerate(ps)])) as ours:
        steps(ps, ours, 1)
        ours.save(tmp_path)
        ours.saved()
    groups = [{"params": qs[:2]}, {"params": qs[2:]}]
    with closing(wrap(torch.optim.AdamW(groups), named_parameters=[(str(i), q) for i, q in enumerate(qs)])) as ours:
        with pytest.raises(ValueError, match="of an optimizer with 1 parameter groups, and this one has 2: make the same groups"):
            ours.load(tmp_path)
        with pytest.raises(RuntimeError, match="the load of .* has failed: load a checkpoint"):
            steps(qs, ours, 1)


def test_a_checkpoint_under_another_name_says_so(tmp_path):
    ps = parameters()
    with closing(wrap(torch.optim.AdamW(ps), name="first")) as ours:
        steps(ps, ours, 1)
        ours.save(tmp_path)
        ours.saved()
    with closing(wrap(torch.optim.AdamW(ps), name="second")) as ours:
        with pytest.raises(Exception, match='part first.states has it: the optimizer that saved it had name="first"; give this one the same name'):
            ours.load(tmp_path)


class Alike(Rule):
    """One tensor for the states of several parameters."""

    def begin(self):
        self.shared = torch.zeros(())

    def update(self, p, group, state):
        state.setdefault("norm", torch.zeros(2))
        state["shared"] = self.param_groups[0].setdefault("one", torch.zeros(2))
        return p.grad


class Changing(Rule):
    """Makes a tensor of a number in its second step."""

    def update(self, p, group, state):
        state["scale"] = p.grad.norm().reshape(1) if state else 0.5
        return p.grad


class Scheduling(Rule):
    """Has another optimizer in itself."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.inner = Basis(torch.optim.SGD([torch.zeros(1)], lr=0.1))

    def update(self, p, group, state):
        return p.grad


class Plain(Rule):
    def update(self, p, group, state):
        return p.grad


class Objects(Rule):
    """Counts in an object of its own."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.counter = Basis(None)

    def update(self, p, group, state):
        self.counter.age += 1
        return p.grad


@pytest.mark.parametrize("mode", ["chunked", "whole"])
@pytest.mark.parametrize(
    "kind, message",
    [
        (Alike, "Alike has one tensor in the state 'shared' of several parameters"),
        (Changing, "Changing: the state of group0.parameter0 changes its form. 'scale'.*"),
        (Scheduling, "Scheduling has a SGD in its attribute 'inner'.matrix, whose state StateOffload does not see"),
    ],
)
def test_refusals_name_the_optimizer(kind, message, mode):
    with pytest.raises(TypeError, match=message):
        StateOffload(kind(parameters(), lr=0.1), mode=mode)


def test_what_no_checkpoint_holds_is_refused_at_once():
    inner = Plain(parameters(), lr=0.1)
    inner.state["table"] = {"rows": torch.zeros(2000)}
    with pytest.raises(TypeError, match="Plain has 'table.rows', which is a tensor of .*beside the state of its parameters"):
        wrap(inner)


def test_objects_that_a_step_changes_are_refused_and_stay_as_they_are():
    inner = Objects(parameters(), lr=0.1)
    with pytest.raises(TypeError, match="a step of Objects changes its attribute 'counter', and its attribute 'counter' is a Basis"):
        wrap(inner, mode="whole")
    assert inner.counter.age == 0
