"""What docs/python.md shows is run."""

import os
import pathlib
import re
import socket

import torch.distributed

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
