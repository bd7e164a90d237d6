"""The state is on a tier: in files, which outlive every process, and have the bits of memory."""

import gc
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import plimsoll.torch
from plimsoll import PlimsollError
from test_crash import big_network, big_train, digest
from test_optimizer import network, train

pytestmark = pytest.mark.usefixtures("way")


def both():
    """A model with parameters of two dtypes: a rank has two shards."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(300, 500).bfloat16(), torch.nn.Linear(500, 30))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"state": "fp32", "moments": "bf16"},
        {"state": "split24", "moments": "int8"},
        {"overlap": "forward"},
    ],
    ids=str,
)
def test_bits_of_memory(tmp_path, settings):
    in_memory, on_tier = network(torch.bfloat16), network(torch.bfloat16)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    for model, more in ((in_memory, {}), (on_tier, {"tier": folders, "memory": "8MiB", "job": "tier"})):
        optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.3, model=model, **settings, **more)
        train(model, optimizer, 12)
        if "overlap" in settings:
            optimizer.synchronize()
        if model is in_memory:
            want = optimizer.state_dict()["state"]
    assert digest(in_memory) == digest(on_tier)
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(want[number][name])), name
    assert {p.suffix for folder in folders for p in folder.iterdir()} == {".index", ".data"}
    optimizer.close(give_back=True)
    assert [p for folder in folders for p in folder.iterdir()] == []


def test_next_process_goes_on(tmp_path):
    undisturbed, model = both(), both()
    for _ in big_train(undisturbed, plimsoll.torch.AdamW(undisturbed.parameters(), lr=1e-2), range(9)):
        pass
    for begin, end in ((0, 4), (4, 9)):
        model = both()
        optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2, tier=tmp_path, job="next")
        optimizer.open()
        assert optimizer.resumed_step == begin
        for _ in big_train(model, optimizer, range(begin, end)):
            pass
        optimizer.close()
    assert digest(model) == digest(undisturbed)


def test_shards_go_back_to_one_step(tmp_path):
    """The power was lost after one shard had committed a step, and before the other had."""
    folder, before = tmp_path / "tier", tmp_path / "before"
    folder.mkdir()

    def go_on(steps):
        model = both()
        optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2, tier=folder, job="back")
        optimizer.open()
        resumed = optimizer.resumed_step
        for _ in big_train(model, optimizer, range(resumed, steps)):
            pass
        optimizer.close()
        return resumed, digest(model)

    assert go_on(2)[0] == 0
    shutil.copytree(folder, before)
    go_on(3)
    for file in before.glob("*fp32*"):
        shutil.copy(file, folder)
    model = both()
    for _ in big_train(model, plimsoll.torch.AdamW(model.parameters(), lr=1e-2), range(5)):
        pass
    assert go_on(5) == (2, digest(model))
    # Two steps apart, there is no such step.
    for file in before.glob("*fp32*"):
        shutil.copy(file, folder)
    with pytest.raises(PlimsollError, match=r"at different steps \(2, 5\)"):
        go_on(6)


TRAINER = """
import sys, torch, plimsoll.torch
from test_crash import big_network, big_train, digest
model = big_network()
optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2, tier=sys.argv[1], memory="8MiB", job="killed")
optimizer.open()
for i in big_train(model, optimizer, range(optimizer.resumed_step, int(sys.argv[2]))):
    print(i + 1, flush=True)
print(digest(model), flush=True)
"""


def all_of(pid):
    """A process and all that it has started."""
    found = [pid]
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        try:
            for child in map(int, (task / "children").read_text().split()):
                found += all_of(child)
        except FileNotFoundError:
            pass  # a thread that has ended
    return found


@pytest.mark.first_way
def test_all_processes_are_killed(tmp_path):
    """Trainer, keeper and service are killed at once, in the middle of a step: all memory is gone."""
    steps, seen = 30, 0
    undisturbed = big_network()
    for _ in big_train(undisturbed, plimsoll.torch.AdamW(undisturbed.parameters(), lr=1e-2), range(steps)):
        pass
    here = str(pathlib.Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])}
    for attempt in range(7):
        command = [sys.executable, "-c", TRAINER, str(tmp_path), str(steps)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as trainer:
            first, last = None, None
            for line in trainer.stdout:
                last = line.strip()
                first = first or last
                if attempt < 6 and int(last) >= seen + 4:
                    doomed = all_of(trainer.pid)
                    for pid in doomed:
                        os.kill(pid, signal.SIGSTOP)  # so that none sees another one end, and puts things in order
                    for pid in doomed:
                        os.kill(pid, signal.SIGKILL)
                    break
            trainer.wait()
        if seen:
            assert int(first) in (seen + 1, seen + 2)  # nothing lost, nothing made twice
        seen = int(last) if attempt < 6 else seen
    assert seen >= 24 and last == digest(undisturbed)


def test_checkpoints_of_a_tier(tmp_path):
    folder, checkpoints = tmp_path / "tier", tmp_path / "checkpoints"
    folder.mkdir()
    checkpoints.mkdir()
    model = network()
    optimizer = plimsoll.torch.AdamW(model.parameters(), lr=1e-2, tier=folder, job="saved")
    train(model, optimizer, 3)
    optimizer.save(checkpoints)
    optimizer.saved()
    train(model, optimizer, 2)
    optimizer.close(give_back=True)
    found = {}
    for tier in (None, folder):
        again = network()
        optimizer = plimsoll.torch.AdamW(again.parameters(), lr=1e-2, tier=tier, job=f"load {tier is None}".replace(" ", "-"))
        optimizer.load(checkpoints)
        train(again, optimizer, 2)
        found[tier] = digest(again)
        optimizer.close()
    assert len(set(found.values())) == 1
    # The files have what was loaded, and the steps since.
    again = network()
    optimizer = plimsoll.torch.AdamW(again.parameters(), lr=1e-2, tier=folder, job="load-False")
    optimizer.open()
    assert optimizer.resumed_step == 5 and digest(again) == found[folder]


def test_what_a_tier_does_not_do_is_refused(tmp_path, service):
    model, other = network(torch.bfloat16), tmp_path / "other"
    other.mkdir()

    def of(**settings):
        return plimsoll.torch.AdamW(model.parameters(), model=model, **{"job": "refused", **settings})

    for settings, says in (
        ({"overlap": "backward", "tier": tmp_path}, "overlap is 'backward': expected None or 'forward' with it"),
        ({"overlap": "async", "tier": tmp_path}, "expected None or 'forward' with it"),
        ({"socket": service.socket, "tier": tmp_path}, "is another process's: start that with --tier"),
        ({"tier": tmp_path / "none"}, "which does not exist: make it before"),
        ({"tier": "a,b"}, "expected one without a comma"),
        ({"memory": "1GiB"}, "there is no tier"),
    ):
        with pytest.raises(ValueError, match=says):
            of(**settings)
    optimizer = of(tier=tmp_path, job="one")
    optimizer.open()
    with pytest.raises(PlimsollError, match="has a service of job one with tier"):
        of(job="one", name="other").open()
    with pytest.raises(PlimsollError, match="ended with code 2"):
        of(tier=tmp_path, job="two").open()  # the folder is locked: the service has said so
    optimizer.close()
    del optimizer
    gc.collect()  # with it ends its service, which has locked the folder
    with pytest.raises(PlimsollError, match="a window of the tier for session rank0/bf16 takes at least"):
        of(tier=other, memory="4KiB", job="three").open()
    with pytest.raises(PlimsollError, match="of job one, and this is session rank0/bf16 of job four"):
        of(tier=tmp_path, job="four").open()
