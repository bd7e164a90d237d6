"""The package builds, installs into a fresh environment, and works there."""

import os
import pathlib
import subprocess
import sys
import sysconfig
import venv

import plimsoll

PACKAGE = pathlib.Path(plimsoll.__file__).resolve().parents[1]

PROGRAM = """
import importlib.metadata, pathlib, sys, torch
import plimsoll, plimsoll.torch
assert pathlib.Path(plimsoll.__file__).is_relative_to(sys.prefix), plimsoll.__file__
assert (pathlib.Path(plimsoll.__file__).parent / "py.typed").exists()
assert importlib.metadata.version("plimsoll-training") == plimsoll.__version__
weight = torch.nn.Parameter(torch.ones(8))
optimizer = plimsoll.torch.SGD([weight], lr=0.5)
weight.sum().backward()
optimizer.step()
assert weight.tolist() == [0.5] * 8
"""


def test_wheel(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    # The build backend is installed here already.
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, PACKAGE], check=True)
    (wheel,) = tmp_path.glob("plimsoll_training-*-py3-none-any.whl")
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    subprocess.run([*pip, "--python", environment / "bin" / "python", "install", "--no-deps", wheel], check=True)
    # torch and numpy take minutes to install: they are taken from this environment.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "these.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run([environment / "bin" / "python", "-c", PROGRAM], check=True, cwd=tmp_path, env=clean)
