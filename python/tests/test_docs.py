"""What the documents show in Python is run."""

import os
import pathlib
import re
import runpy
import socket
import subprocess

import pytest
import torch.distributed

import plimsoll.torch

from gpt import GPT, ROOT, batch, text


def test_documented_programs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    for variable, value in dict(RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port).items():
        monkeypatch.setenv(variable, str(value))
    from test_trainer import Texts, model as hf_model

    names = {
        "model": GPT().bfloat16(),
        "batches": [batch(text(), i, size=1) for i in range(3)],
        "hf_model": hf_model(torch.float32),
        "dataset": Texts(),
    }
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    assert len(programs) >= 8
    try:
        for i, program in enumerate(programs):
            # 300 steps take a while, and three show as much.
            exec(compile(program.replace("300", "8"), f"docs/python.md, program {i + 1}", "exec"), names)
            if "DistributedDataParallel" in program or "zero2" in program:
                optimizer, module = names["optimizer"], names["ddp"] if "ddp" in program else names["model"]
                module(names["batches"][0][:, :-1]).float().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert (pathlib.Path("checkpoints").is_dir() and os.listdir("checkpoints")) == ["step-00000003"]


def test_steps_that_are_not_exact(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"model": GPT().bfloat16(), "batches": [batch(text(), i, size=1) for i in range(3)]}
    late, zenflow = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "late-steps.md").read_text(), re.DOTALL)
    for program in (late, zenflow):
        exec(compile(program, "docs/late-steps.md", "exec"), names)
        state = names["optimizer"].state_dict()["state"]
        assert state and all(entry["step"] == 3 for entry in state.values())


def test_muon(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"model": GPT().bfloat16(), "batches": [batch(text(), i, size=1) for i in range(2)]}
    for i, program in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "muon.md").read_text(), re.DOTALL)):
        exec(compile(program, f"docs/muon.md, program {i + 1}", "exec"), names)
    assert names["training"] == {"epoch": 1} and os.listdir("checkpoints") == [f"step-{names['step']:08}"]


def test_the_program_of_state_offload(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"model": GPT().bfloat16(), "batches": [batch(text(), i, size=1) for i in range(3)]}
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "state-offload.md").read_text(), re.DOTALL)
    exec(compile(program, "docs/state-offload.md", "exec"), names)
    assert names["training"]["scheduler"]["last_epoch"] == 3 and os.listdir("checkpoints") == ["step-00000003"]


def test_the_program_of_a_tier(tmp_path, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_JOB", "tier")  # the service of this process has no tier
    model = GPT().bfloat16()
    names = {"AdamW": plimsoll.torch.AdamW, "model": model}
    for folder in ("nvme0", "nvme1"):
        (tmp_path / folder).mkdir()
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tier.md").read_text(), re.DOTALL)
    exec(compile(program.replace("/mnt", str(tmp_path)), "docs/tier.md", "exec"), names)
    model.loss(batch(text(), 0, size=1)).backward()
    names["optimizer"].step()
    assert len(list(tmp_path.glob("nvme*/*.data"))) == 2 * len(list(tmp_path.glob("nvme0/*.index")))
    names["optimizer"].close(give_back=True)


def test_checkpoints_to_and_from_torch(tmp_path, monkeypatch):
    """The parameters are of two types: their order in a checkpoint is not that of the optimizer. One is not trained."""
    monkeypatch.chdir(tmp_path)
    convert = [os.environ["PLIMSOLL"], "checkpoint", "convert"]
    # The programs after these two are run by TestDeepSpeed and TestDistributedCheckpoint in Go, and in internal/state/checkpoint/foreign/testdata.
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "checkpoints.md").read_text(), re.DOTALL)
    to_torch, from_torch = programs[:2]
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(4)))
    model[0].bfloat16()
    model[1].requires_grad_(False)
    model[3].bfloat16()
    ours = plimsoll.torch.AdamW(model.parameters(), lr=1e-3, model=model)
    for number, p in enumerate(model.parameters(), 1):
        p.grad = torch.full_like(p, number) if p.requires_grad else None
    ours.step()
    ours.save("checkpoints")
    ours.saved()

    subprocess.run([*convert, "checkpoints", "optimizer.pt", "--to", "torch"], check=True)
    names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3), "torch": torch}
    exec(compile(to_torch, "docs/checkpoints.md, to torch", "exec"), names)
    entries = ours.state_dict()["state"]
    for i, (name, p) in enumerate(model.named_parameters()):
        if p.requires_grad:
            theirs = names["optimizer"].state[p]
            assert theirs["step"] == 1 and torch.equal(theirs["exp_avg"], entries[i]["exp_avg"].to(p.dtype))
            assert torch.equal(names["master"][name].to(p.dtype), p)
    assert len(names["optimizer"].state) == 3

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    weights = {name: p.detach().float() for name, p in trained.items()}
    theirs = torch.optim.AdamW([torch.nn.Parameter(w.clone()) for w in weights.values()])
    for group in theirs.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    theirs.step()
    exec(
        compile(from_torch, "docs/checkpoints.md, from torch", "exec"),
        {"optimizer": theirs, "names": list(weights), "dict_of_fp32_weights": weights, "torch": torch},
    )
    subprocess.run([*convert, "optimizer.pt", "converted", "--from", "torch"], check=True)
    ours.load("converted")
    entries = ours.state_dict()["state"]
    assert all(torch.equal(entries[i]["exp_avg"], torch.full((16, 16), 0.1)) for i in entries)


def test_plans():
    names = {}
    for i, program in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "notebook.md").read_text(), re.DOTALL)):
        exec(compile(program, f"docs/notebook.md, program {i + 1}", "exec"), names)
    assert names["plan"].verdict == "fits" and names["found"].fastest["verdict"] == "fits"


def test_the_example_of_a_plan(capsys):
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(ROOT / "examples" / "python" / "will_it_fit.py", run_name="__main__")
    assert ended.value.code is None
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("micro batch 32: does not fit, ")
    assert re.fullmatch(r"micro batch \d: fits, \d+\.\d GiB", last)


def test_the_cookbook_moves_a_job_from_deepspeed(tmp_path, monkeypatch):
    convert = [os.environ["PLIMSOLL"], "checkpoint", "convert", ROOT / "examples" / "deepspeed", tmp_path / "converted"]
    subprocess.run([*convert, "--from", "deepspeed"], check=True)
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "cookbook.md").read_text(), re.DOTALL)
    names = {}
    exec(compile(program, "docs/cookbook.md", "exec"), names)
    assert names["optimizer"].resumed_step == 3
    assert all(state["step"] == 4 for state in names["optimizer"].state_dict()["state"].values())


def test_the_program_of_tenants(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = GPT().bfloat16()
    names = {"model": model, "requests": [(name, batch(text(), i, size=1)) for i, name in enumerate(["ann", "bob", "ann"])]}
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tenants.md").read_text(), re.DOTALL)
    exec(compile(program, "docs/tenants.md", "exec"), names)
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["ann", "1"], ["bob", "1"], ["ann", "2"]]
    names["tenants"].evict("bob")
    assert names["tenants"].saved() == ["bob"] and names["tenants"].resident == ("ann",)
