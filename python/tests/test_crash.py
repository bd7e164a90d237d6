"""The service or the trainer is killed: training goes on with the same bits."""

import contextlib
import hashlib
import os
import pathlib
import random
import signal
import subprocess
import threading
import warnings

import numpy as np
import pytest
import torch

import plimsoll.torch
from awaited import answers
from gpt import GPT, batch, text
from nightly import nightly_rows
from plimsoll import PlimsollError, Session, StateLost, protocol
from plimsoll.torch.layout import is_sharded
from preloaded import python
from test_client import DOCUMENT, GROUP
from test_optimizer import assert_same, backward, network, train


def workers(service):
    """The processes of the service that the keeper has started."""
    found = []
    for task in pathlib.Path(f"/proc/{service.process.pid}/task").iterdir():
        try:
            found += map(int, (task / "children").read_text().split())
        except FileNotFoundError:
            pass  # a thread that has ended
    return found


def kill_worker(service):
    """Kills the service. How many processes that was: none while it is being started again."""
    killed = 0
    for pid in workers(service):
        try:
            os.kill(pid, signal.SIGKILL)
            killed += 1
        except ProcessLookupError:
            pass
    return killed


def big_network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(1000, 2000), torch.nn.Linear(2000, 1000)).bfloat16()


def big_train(model, optimizer, steps):
    for i in steps:
        generator = torch.Generator().manual_seed(i)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()
        yield i


def digest(model):
    hashed = hashlib.sha256()
    for p in model.parameters():
        whole = p.full_tensor() if is_sharded(p) else p
        hashed.update(whole.detach().contiguous().view(torch.uint8).numpy())
    return hashed.hexdigest()


def test_service_is_killed_between_steps(service):
    undisturbed, model = network(), network()
    train(undisturbed, plimsoll.torch.AdamW(undisturbed.parameters(), lr=1e-2, max_grad_norm=0.3), 20)
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.3, socket=service.socket)
    optimizer.open()
    for i in range(20):
        backward(model, i)
        if i % 3 == 0:
            answers(service)  # it is no longer being started again
            assert kill_worker(service)
        optimizer.step()
        if i % 4 == 0:
            kill_worker(service)
        optimizer.zero_grad()
    assert_same(model, undisturbed, 0, 0)


class Killer:
    """Kills a service again and again, each time at a random instant after what is to be disturbed has begun."""

    kills = 10

    def __init__(self, service, seed, within):
        self._service, self._chance, self._within = service, random.Random(seed), within
        self._begun, self._over, self._killed = threading.Event(), threading.Event(), 0
        self.made = 0

    def begun(self):
        self._begun.set()

    def steps(self):
        """Numbers of steps, until the service was killed often enough: then ``made`` is how many there were."""
        while self._killed < self.kills:
            assert self.made < 10_000, f"in {self.made} steps the service was killed {self._killed} times"
            yield self.made
            self.made += 1

    def run(self):
        while True:
            self._begun.wait()
            if self._over.is_set():
                return
            self._begun.clear()
            answers(self._service)  # who is killed again and again before it serves is not started again
            self._over.wait(self._chance.uniform(0, self._within))
            self._killed += kill_worker(self._service)

    def end(self):
        self._over.set()
        self._begun.set()


@contextlib.contextmanager
def killed_again_and_again(service, seed, within):
    """Kills the service meanwhile, some seconds of ``within`` after each time that the killer is told of a beginning."""
    killer = Killer(service, seed, within)
    thread = threading.Thread(target=killer.run)
    thread.start()
    try:
        yield killer
    finally:
        killer.end()
        thread.join()


def test_service_is_killed_during_steps(service):
    undisturbed, model = big_network(), big_network()
    optimizer = plimsoll.torch.AdamW(model.parameters(), max_grad_norm=1.0, socket=service.socket)
    optimizer.open()
    with killed_again_and_again(service, 1, within=0.05) as killer:
        for _ in big_train(model, optimizer, killer.steps()):
            killer.begun()
    reference = plimsoll.torch.AdamW(undisturbed.parameters(), max_grad_norm=1.0)
    for _ in big_train(undisturbed, reference, range(killer.made)):
        pass
    assert digest(model) == digest(undisturbed)


def test_service_is_killed_while_gradients_are_added(service):
    count = 3_000_001  # more than half a window
    piece = {"name": "weight", "shape": [count], "group": 0, "first": 0, "count": count}
    document = {**DOCUMENT, "state": "fp32", "parameter": "fp32", "gradient": "fp32", "parameters": [piece]}
    session = Session(service.socket, document)
    session.set_step(0)
    gradients = np.frombuffer(session.gradients.memory, np.float32)[:count]
    gradients[:] = 7
    session.clear()
    want, generator = np.zeros(count, np.float32), np.random.default_rng(0)
    with killed_again_and_again(service, 2, within=0.02) as killer:
        for i in killer.steps():
            values = generator.integers(-1000, 1000, count - 3 * i).astype(np.float32)  # whose sums are exact
            killer.begun()
            session.accumulate(i, values)
            want[i : i + len(values)] += values
    assert session.accumulated == 2 * killer.made
    assert np.array_equal(gradients, want)
    session.close()
    assert Session(service.socket, document).opened.accumulated == 2 * killer.made


def test_service_is_gone_for_good(service):
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters(), socket=service.socket)
    train(model, optimizer, 2)
    service.process.kill()
    service.process.wait()
    for shard in optimizer._shards:
        shard.session.patience = 0.2
    with pytest.raises(RuntimeError, match="has ended .* no other was started"):
        train(model, optimizer, 1)


def train_on(steps, **options):
    """What a program that may be restarted does: it goes on from where the state is."""
    torch.set_num_threads(1)
    model, data = GPT().bfloat16(), text()
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, model=model, **options)
    begin = optimizer.resumed_step
    for i in range(begin, steps):
        print("step", i, flush=True)
        model.loss(batch(data, i)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(model), begin, optimizer.state_dict()["state"][0]["step"].item()


def start_trainer(service, call, **streams):
    """A process that makes a call such as ``"test_crash.train_on(30)"``, and prints its results."""
    here = pathlib.Path(__file__).parent
    environment = {
        **os.environ,
        "PLIMSOLL_SOCKET": service.socket,
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)]),
    }
    program = f"import torch, {call.split('.')[0]}; torch.manual_seed(1); print(*{call})"
    return subprocess.Popen([*python(), "-c", program], stdout=subprocess.PIPE, text=True, env=environment, **streams)


def kill_trainer(process, line):
    """Kills it when it has printed a line."""
    for found in process.stdout:
        if found.startswith(line):
            break
    process.kill()
    process.stdout.read()  # until no process can write to it any more
    process.wait()


def test_trainer_is_killed(service):
    torch.manual_seed(1)
    wanted, _, _ = train_on(30)
    kill_trainer(start_trainer(service, "test_crash.train_on(30)"), "step 19")
    process = start_trainer(service, "test_crash.train_on(30)")
    found, begin, steps = process.stdout.read().splitlines()[-1].split()
    assert process.wait() == 0
    assert int(begin) >= 19 and float(steps) == 30
    assert found == wanted


class Mixed(torch.nn.Sequential):
    """Parameters of two types, so that each rank has two sessions."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(16, 40), torch.nn.Tanh(), torch.nn.Linear(40, 4).bfloat16())

    def forward(self, x):
        return self[2](self[1](self[0](x)).bfloat16())


RANK = """
import os, pathlib, signal, sys
import torch
import torch.distributed as dist
from plimsoll.client import Session
from plimsoll.torch import AdamW
from leaving import leave
from test_crash import Mixed, digest
from test_optimizer import backward, network

directory, victim, calls, clip, sharding, types = sys.argv[1:]
dist.init_process_group("gloo")
rank = os.environ["RANK"]
model = Mixed() if types == "2" else network()
if sharding == "hybrid":  # two replicas of two shards
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, sharding = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), None
    for layer in model[0], model[2], model:
        fully_shard(layer, mesh=mesh)
group = None
if sharding == "copies":
    group, sharding = dist.group.WORLD, None
optimizer = AdamW(model.parameters(), lr=1e-2, max_grad_norm=float(clip) or None, sharding=sharding, process_group=group)
first = optimizer.resumed_step
begin, begun, left = Session.begin, Session.begun, int(calls)
made = os.open(pathlib.Path(directory) / "made", os.O_RDWR)  # a byte for each session of the others that has made step 8

def begun_and_said(self, request):
    result = begun(self, request)
    if rank != victim and self.step == 8:
        os.write(made, b"!")
    return result

Session.begun = begun_and_said

def begin_or_die(self, *arguments, **options):
    global left
    if rank == victim and first == 0 and self.step == 7:
        if left == 0:
            others = (int(os.environ["WORLD_SIZE"]) - 1) * int(types)
            signal.alarm(120)  # ends a test that would hang
            while others:
                others -= len(os.read(made, others))
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
    request = begin(self, *arguments, **options)
    if rank == victim:
        self.begun(request)
    return request

Session.begin = begin_or_die
for i in range(first, 12):
    backward(model, i)
    optimizer.step()
    optimizer.zero_grad()
(pathlib.Path(directory) / rank).write_text(f"{first} {digest(model)}")
dist.destroy_process_group()
leave()
"""


@pytest.mark.parametrize(
    "ranks,victim,calls,clip,sharding,types",
    [
        (2, 0, 1, 0, "zero2", 2),
        (1, 0, 1, 0, "zero1", 2),
        (2, 1, 0, 0.3, "copies", 1),
        *nightly_rows((2, 1, 0, 0.3, "zero1", 1), (4, 3, 1, 0.3, "hybrid", 2), (2, 0, 1, 0, "copies", 2)),
    ],
)
def test_ranks_that_are_killed_between_their_steps(tmp_path, ranks, victim, calls, clip, sharding, types):
    """Some shards have made step 8 when a rank is killed: started again, the others make it, too."""
    if sharding == "hybrid":
        pytest.importorskip("torch.distributed.fsdp", reason="no fully_shard in this torch")
    here = pathlib.Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    program = [*python(), "-c", RANK, tmp_path, victim, calls, clip, sharding, types]
    os.mkfifo(tmp_path / "made")
    command = [os.environ["PLIMSOLL"], "run", "--nproc", ranks, "--restarts", "1", "--", *program]
    done = subprocess.run([str(c) for c in command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    model = Mixed() if types == 2 else network()
    train(model, plimsoll.torch.AdamW(model.parameters(), lr=1e-2, max_grad_norm=clip or None), 12)
    assert [(tmp_path / str(r)).read_text() for r in range(ranks)] == [f"8 {digest(model)}"] * ranks


def test_a_step_that_not_all_have_prepared(service):
    model = Mixed()
    optimizer = plimsoll.torch.AdamW(model.parameters(), socket=service.socket)
    train(model, optimizer, 3)
    bf16 = optimizer._shards[0].session
    bf16.begun(bf16.begin(1.0, optimizer._numbers(), wait=True))
    optimizer.close()
    with pytest.raises(RuntimeError, match="at different steps .3, 4., and not all prepared the last one; .* checkpoint"):
        plimsoll.torch.AdamW(Mixed().parameters(), socket=service.socket).open()


def test_a_state_that_was_being_changed_is_not_gone_on_from(service):
    """A trainer dies while it loads another one: the next begins anew, and is told."""
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters(), socket=service.socket)
    train(model, optimizer, 3)
    session = optimizer._shards[0].session
    session.write(protocol.FIRST_MOMENT, 0, np.ones(100, np.float32))
    optimizer.close()
    with pytest.warns(UserWarning, match="at step 3, and was being changed when its trainer died: .* is freed"):
        assert plimsoll.torch.AdamW(network().parameters(), socket=service.socket).resumed_step == 0


def test_service_is_killed_while_gradients_arrive(service):
    """Gradients come in while the step is under way, over a service that is killed: the bits are those of plain steps."""
    count = 1_000_000
    document = {**DOCUMENT, "parameters": [{"name": "weight", "shape": [count], "group": 0, "first": 0, "count": count}]}
    plain, arriving = (Session(service.socket, {**document, "part": part}) for part in ("plain", "arriving"))
    chance = np.random.default_rng(0)

    def gradients(session):
        return np.frombuffer(session.gradients.memory, np.uint16, count)

    for session in (plain, arriving):
        session.set_step(0)
        session.order([(count // 2, count // 2)])
    with killed_again_and_again(service, 6, within=0.03) as killer:
        for made in killer.steps():
            step = made + 1
            values = (chance.standard_normal(count, np.float32).view(np.uint32) >> 16).astype(np.uint16)
            gradients(plain)[:] = values
            plain.begun(plain.begin(0.5, [GROUP], wait=True))
            gradients(arriving)[:] = 0x7F80  # infinite
            arriving.begun(arriving.begin(0.5, [GROUP], wait=False, arriving=True))
            killer.begun()
            for first in chance.permutation(count // 10_000) * 10_000:
                gradients(arriving)[first : first + 10_000] = values[first : first + 10_000]
                arriving.ready(int(first), 10_000)
            assert arriving.waited(arriving.wait(0, count)) > 0 and arriving.step == step
    for stream in (protocol.MASTER_WEIGHTS, protocol.FIRST_MOMENT, protocol.SECOND_MOMENT):
        np.testing.assert_array_equal(plain.read(stream, 0, count), arriving.read(stream, 0, count))
    arriving.ready(0, 100)  # of the next step
    assert arriving.norm_result(arriving.norm()) == plain.norm_result(plain.norm())


def test_trainer_is_killed_while_gradients_arrive(service, tmp_path):
    """The next one is told that the state is torn, and begins anew or at a checkpoint."""
    model = big_network()
    optimizer = plimsoll.torch.AdamW(model.parameters(), socket=service.socket)
    for _ in big_train(model, optimizer, range(3)):
        pass
    optimizer.save(tmp_path)
    optimizer.saved()
    optimizer.close()
    saved = digest(model)
    child = os.fork()
    if child == 0:
        optimizer = plimsoll.torch.AdamW(big_network().parameters(), socket=service.socket)
        optimizer.open()
        session = optimizer._shards[0].session
        session.begin(1.0, [GROUP], wait=False, arriving=True)
        session.ready(0, session.elements - 1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    model = big_network()
    anew = plimsoll.torch.AdamW(model.parameters(), socket=service.socket)
    with pytest.warns(UserWarning, match="died in the middle of step 4, before all gradients were there: .* is freed"):
        anew.open()
    assert anew.resumed_step == 0 and digest(model) == digest(big_network())
    anew.load(tmp_path)
    assert anew.resumed_step == 3 and digest(model) == saved


@pytest.mark.parametrize("way", ["load", "load_state_dict"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_state_of_which_a_part_was_replaced_is_not_gone_on_from(service, tmp_path, way, first):
    """A trainer dies when one part has the state of another training at the same step, and the other its own."""
    model, other = Mixed(), Mixed()
    optimizer = plimsoll.torch.AdamW(model.parameters(), socket=service.socket)
    train(model, optimizer, 3)
    successor = plimsoll.torch.AdamW(other.parameters(), lr=0.1)
    train(other, successor, 3)
    successor.save(tmp_path)
    successor.saved()
    session, died = optimizer._shards[1 - first].session, KeyboardInterrupt("the trainer is killed here")

    def die(*_, **__):
        raise died

    session.load = session.write = die
    optimizer._shards._shards = optimizer._shards[:: 1 if first == 0 else -1]
    with pytest.raises(KeyboardInterrupt):
        if way == "load":
            optimizer.load(tmp_path)
        else:
            optimizer.load_state_dict(successor.state_dict())
    optimizer.close()
    again = Mixed()
    optimizer = plimsoll.torch.AdamW(again.parameters(), socket=service.socket)
    with pytest.warns(UserWarning, match="was being changed when its trainer died: it is inconsistent") as warned:
        assert optimizer.resumed_step == 0
    assert len(warned) == 2  # the other part alone is none to go on from
    assert_same(again, Mixed(), 0, 0)
    optimizer.load(tmp_path)
    assert optimizer.resumed_step == 3
    assert_same(again, other, 0, 0)


class BigMixed(torch.nn.Sequential):
    """Two parts, to load which takes a while."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 1000).bfloat16())


@pytest.fixture(scope="module")
def two_of_a_step(tmp_path_factory):
    """Checkpoints of two trainings at the same step: the folder and the weights of each."""
    found = []
    for rate in 0.01, 0.02:
        model, folder = BigMixed(), tmp_path_factory.mktemp("checkpoints")
        optimizer = plimsoll.torch.AdamW(model.parameters(), lr=rate)
        for _ in big_train(model, optimizer, range(3)):
            pass
        optimizer.save(folder)
        optimizer.saved()
        found.append((folder, digest(model)))
    return found


def die_after(messages):
    """This process is killed as soon as its sessions have sent and received so many messages."""
    left = iter(range(messages - 1))

    def counted(act):
        def act_or_die(*arguments):
            act(*arguments)
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        return act_or_die

    Session._transmit, Session._receive = counted(Session._transmit), counted(Session._receive)


def test_trainer_is_killed_while_it_loads(service, two_of_a_step):
    """The state is the old one or the new one, or is said to be neither; and the next can load."""
    (old, before), (new, after) = two_of_a_step
    outcomes, died = [], True
    while died:
        optimizer = plimsoll.torch.AdamW(BigMixed().parameters(), socket=service.socket)
        optimizer.load(old)
        optimizer.close()
        child = os.fork()
        if child == 0:
            optimizer = plimsoll.torch.AdamW(BigMixed().parameters(), socket=service.socket)
            optimizer.open()
            die_after(len(outcomes) + 1)
            optimizer.load(new)
            os._exit(0)
        died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        model = BigMixed()
        optimizer = plimsoll.torch.AdamW(model.parameters(), socket=service.socket)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                optimizer.open()
            outcomes.append({before: "old", after: "new"}[digest(model)])
        except (UserWarning, PlimsollError) as error:
            assert "load" in str(error)
            outcomes.append("neither")
        optimizer.load(new)
        assert digest(model) == after
        optimizer.close()
    assert len(outcomes) > 2 and "neither" in outcomes and outcomes[-1] == "new"


def test_service_is_killed_while_it_loads(service, two_of_a_step):
    model = BigMixed()
    optimizer = plimsoll.torch.AdamW(model.parameters(), socket=service.socket)
    optimizer.open()
    with killed_again_and_again(service, 3, within=0.05) as killer:
        for i in killer.steps():
            folder, wanted = two_of_a_step[i % 2]
            killer.begun()
            optimizer.load(folder)
            assert digest(model) == wanted and optimizer.resumed_step == 3


def test_weights_after_close_are_the_models_own(service):
    """What trains the state further does not change them, nor they the state."""
    model, again = network(), network()
    optimizer = plimsoll.torch.AdamW(model.parameters(), socket=service.socket)
    train(model, optimizer, 1)
    backward(model, 1)
    before = [x.detach().clone() for p in model.parameters() for x in (p, p.grad)]
    optimizer.close()
    optimizer = plimsoll.torch.AdamW(again.parameters(), socket=service.socket)
    assert optimizer.resumed_step == 1
    train(again, optimizer, 1, 1)
    assert all(torch.equal(x, b) for x, b in zip((x for p in model.parameters() for x in (p, p.grad)), before))
    trained = digest(again)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert digest(again) == trained


def test_gradients_of_other_weights_are_refused(service):
    model = network()
    train(model, plimsoll.torch.AdamW(model.parameters(), socket=service.socket), 3)
    again = network()
    optimizer = plimsoll.torch.AdamW(again.parameters(), socket=service.socket)
    backward(again, 3)
    with pytest.raises(RuntimeError, match="read optimizer.resumed_step before the first forward pass"):
        optimizer.step()
    assert_same(again, model, 0, 0)  # it has the right weights now
    optimizer.zero_grad()
    assert optimizer.resumed_step == 3
    train(again, optimizer, 1, 3)


def test_other_model_of_the_same_job_is_refused(service):
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters(), socket=service.socket)
    train(model, optimizer, 1)
    optimizer.close()
    with pytest.raises(RuntimeError, match="differs"):
        plimsoll.torch.AdamW(network().half().float()[0].parameters(), socket=service.socket).open()


def test_state_that_was_begun_is_made_anew(service, monkeypatch):
    # A trainer that dies before its weights are written leaves no state to go on from.
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters(), socket=service.socket)
    with monkeypatch.context() as m:
        m.setattr("plimsoll.torch.shard.Shard.initialize", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            optimizer.open()
    weights = model[0].weight.detach().clone()
    again = plimsoll.torch.AdamW(model.parameters(), socket=service.socket)
    assert again.resumed_step == 0
    assert torch.equal(model[0].weight, weights)
    train(model, again, 1)


def test_lost_state(service):
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters(), socket=service.socket)
    train(model, optimizer, 1)
    # Another client gives the state back behind this one's back: as after a
    # service that was started anew.
    optimizer._shards[0].session.abandon()
    twin = plimsoll.torch.AdamW(network().parameters(), socket=service.socket)
    twin.open()
    twin.close(give_back=True)
    session = optimizer._shards[0].session
    with pytest.raises(StateLost):
        session._recover(ConnectionError("a test"))


def test_a_forked_child_changes_nothing_of_its_parent():
    """Neither gradients nor weights, which are in shared memory."""
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters(), max_grad_norm=1.0)
    train(model, optimizer, 1)
    backward(model, 1)
    before = [x.detach().clone() for p in model.parameters() for x in (p, p.grad)]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            gradient = model[0].weight.grad.clone()
            backward(model, 1)
            torch.testing.assert_close(model[0].weight.grad, 2 * gradient)
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert all(torch.equal(x, b) for x, b in zip((x for p in model.parameters() for x in (p, p.grad)), before))
    optimizer.step()
