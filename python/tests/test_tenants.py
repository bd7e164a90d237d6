"""Many adapters are trained in turns with one model: each has the bits that it would have alone."""

import pathlib
import subprocess

import pytest
import torch

import plimsoll.torch
from nightly import nightly_rows
from plimsoll.torch import Tenants
from preloaded import python
from test_crash import digest

AdamW = plimsoll.torch.AdamW
NAMES = ("a", "bc", "d.e", "f", "g_1")  # more than are in memory


def network():
    """Parameters of two dtypes: a tenant has two shards."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(30, 50).bfloat16(), torch.nn.Linear(50, 20))


def give_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device)


def alone(name, steps, **options):
    """The digest of a tenant that is trained by itself."""
    model = network()
    optimizer = AdamW(model.parameters(), lr=1e-2, job=f"alone-{name}", **options)
    for step in range(steps):
        give_gradients(model, seed_of(name, step))
        optimizer.step()
    return digest(model)


def seed_of(name, step):
    return sum(map(ord, name)) + 1000 * step


def train(model, tenant, steps):
    for step in steps:
        give_gradients(model, seed_of(tenant.name, step))
        tenant.step()
        tenant.zero_grad()


@pytest.mark.parametrize("options", [{}, {"moments": "int8", "max_grad_norm": 0.5}, {"state": "fp32"}], ids=str)
def test_bits_of_each_alone(service, options):
    model, names = network(), ("a", "bc", "d.e")
    tenants = Tenants(model.parameters(), optimizer=AdamW, lr=1e-2, socket=service.socket, **options)
    for turn in range(4):
        for name in names:
            train(model, tenants.switch(name), range(2 * turn, 2 * turn + 2))
    assert tenants.resident == names
    for name in names:
        tenants.switch(name)
        assert digest(model) == alone(name, 8, **options), name
    tenants.close()
    assert digest(model) == alone("d.e", 8, **options)


def test_others_leave_the_memory(service, tmp_path):
    model, names = network(), [f"t{i}" for i in range(5)]
    tenants = Tenants(model.parameters(), optimizer=AdamW, lr=1e-2, folder=tmp_path, resident=2, socket=service.socket)
    for turn in range(3):
        for name in names:
            tenant = tenants.switch(name)
            assert tenant.resumed_step == 2 * turn
            assert tenant.param_groups[0]["betas"] == (0.9, 0.999)
            assert tenant.param_groups[0]["lr"] == (1e-2 if turn == 0 else turn)
            tenant.param_groups[0]["lr"] = 1e-2
            train(model, tenant, range(2 * turn, 2 * turn + 2))
            tenant.param_groups[0]["lr"] = turn + 1  # which the next turn finds
            assert len(tenants.resident) <= 2
    assert tenants.saved() == names
    assert all(len(list((tmp_path / name).glob("step-*"))) == 1 for name in names)
    for name in names:
        tenants.switch(name)
        assert digest(model) == alone(name, 6), name
    tenants.remove("t0")
    assert "t0" not in tenants.saved() and tenants.switch("t0").resumed_step == 0


def test_which_leaves(service, tmp_path):
    """The one that was not used for the longest."""
    tenants = Tenants(network().parameters(), optimizer=AdamW, folder=tmp_path, resident=3, socket=service.socket)
    for name in ("a", "b", "c", "a", "b", "d"):
        tenants.switch(name)
    assert tenants.resident == ("a", "b", "d")


def test_next_process_finds_them(service, tmp_path):
    """What was saved before it was changed again is not what a tenant goes on from."""
    for begin in (0, 3):
        model = network()
        tenants = Tenants(model.parameters(), optimizer=AdamW, lr=1e-2, folder=tmp_path, resident=2, socket=service.socket, job="next")
        for name in ("a", "b", "c", "a"):
            tenant = tenants.switch(name)
            assert tenant.resumed_step >= begin
            if tenant.resumed_step == begin:
                train(model, tenant, range(begin, begin + 3))
            assert digest(model) == alone(name, begin + 3)
        tenants.close()


@pytest.mark.parametrize("part", ["bf16", "fp32"])
def test_died_in_the_middle_of_a_change(service, tmp_path, part):
    """A state was saved, and only a part of it was given back; or it was opened, and not loaded yet."""
    model, options = network(), dict(lr=1e-2, socket=service.socket, job="half")
    tenants = Tenants(model.parameters(), optimizer=AdamW, folder=tmp_path, **options)
    train(model, tenants.switch("a"), range(3))
    tenants.switch("b")
    died = tenants._resident["a"].optimizer
    tenants._drop = lambda tenant: None
    tenants.evict("a")
    for shard in died._shards:
        shard.session.close(give_back=shard.name == part)
    model = network()
    tenants = Tenants(model.parameters(), optimizer=AdamW, folder=tmp_path, **options)
    tenant = tenants.switch("a")
    assert tenant.resumed_step == 3
    train(model, tenant, range(3, 5))
    assert digest(model) == alone("a", 5)
    tenants.close(give_back=True)
    new = AdamW(network().parameters(), name="a", **options)
    new.open()  # and this one is not loaded
    new.close()
    tenants = Tenants(model.parameters(), optimizer=AdamW, folder=tmp_path, **options)
    tenant = tenants.switch("a")
    assert tenant.resumed_step == 3
    assert digest(model) == alone("a", 3)


@pytest.mark.parametrize("kills, seed", [(4, 1), *nightly_rows((50, 2))])
def test_trainers_are_killed(service, tmp_path, kills, seed):
    program = pathlib.Path(__file__).with_name("killed_tenants.py")
    command = [*python(), str(program), service.socket, str(tmp_path), str(kills), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == kills


@pytest.mark.parametrize("state", ["split", "fp32"])
def test_changes_of_the_program_are_kept(service, state):
    model = network()
    tenants = Tenants(model.parameters(), optimizer=AdamW, lr=1e-2, state=state, socket=service.socket)
    train(model, tenants.switch("a"), range(1))
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    model[1].weight.data = torch.full_like(model[1].weight, 3.0)
    tenants.switch("b")
    assert not (model[0].weight == 2).any()
    tenants.switch("a")
    assert (model[0].weight == 2).all() and (model[1].weight == 3).all()
    reference = network()
    optimizer = AdamW(reference.parameters(), lr=1e-2, state=state, job="reference")
    for step in range(2):
        give_gradients(reference, seed_of("a", step))
        optimizer.step()
        if step == 0:
            with torch.no_grad():
                reference[0].weight.fill_(2.0)
                reference[1].weight.fill_(3.0)
    train(model, tenants.active, range(1, 2))
    assert digest(model) == digest(reference)


def test_refusals(service, tmp_path):
    model = network()
    make = lambda **options: Tenants(model.parameters(), optimizer=AdamW, socket=service.socket, **options)
    for options, error, message in (
        ({"sharding": "zero1"}, TypeError, "takes no sharding"),
        ({"resident": 0, "folder": tmp_path}, ValueError, "resident is 0"),
        ({"resident": 2}, ValueError, "there is no folder"),
    ):
        with pytest.raises(error, match=message):
            make(**options)
    with pytest.raises(ValueError, match="no parameters"):
        Tenants([], optimizer=AdamW)
    tenants = make()
    for name in ("", ".", "../x", "a/b", "a" * 33):
        with pytest.raises(ValueError, match="the name of a tenant"):
            tenants.switch(name)
    a, b = tenants.switch("a"), tenants.switch("b")
    give_gradients(model, 0)
    with pytest.raises(RuntimeError, match=r"a step of tenant a, and the model has tenant b: call switch\('a'\)"):
        a.step()
    with pytest.raises(RuntimeError, match="gradients of tenant b"):
        tenants.switch("a")
    assert tenants.active is b
    b.step()
    b.zero_grad()
    with pytest.raises(ValueError, match="no folder"):
        tenants.evict("a")
    with pytest.raises(ValueError, match="the one that the model has"):
        tenants.remove("b")
    with pytest.raises(RuntimeError, match="convert the model before"):
        model.half()
        b.step()
