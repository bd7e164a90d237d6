"""The package builds, installs into a fresh environment, and works there."""

import os
import pathlib
import subprocess
import sys
import sysconfig
import venv

import pytest

import plimsoll

PACKAGE = pathlib.Path(plimsoll.__file__).resolve().parents[1]

PROGRAM = """
import importlib.metadata, pathlib, sys, torch
import plimsoll, plimsoll.torch
assert pathlib.Path(plimsoll.__file__).is_relative_to(sys.prefix), plimsoll.__file__
assert (pathlib.Path(plimsoll.__file__).parent / "py.typed").exists()
assert importlib.metadata.version("plimsoll-training") == plimsoll.__version__
"""

STEP = """
import torch, plimsoll.torch
weight = torch.nn.Parameter(torch.ones(8))
optimizer = plimsoll.torch.SGD([weight], lr=0.5)
weight.sum().backward()
optimizer.step()
assert weight.tolist() == [0.5] * 8
"""


SELF_CONTAINED = """
import pathlib, sys
from plimsoll.service import find_program
assert pathlib.Path(find_program()).is_relative_to(sys.argv[1]), find_program()
"""


@pytest.mark.parametrize("target", [False, True], ids=["environment", "target"])
def test_the_wheel_brings_its_program(tmp_path, target):
    """The client finds it without PATH, wherever pip has put it."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    for name in ("NOTICES.txt", "ghost.so"):
        (tmp_path / name).write_text("for this test")
    program = {
        "PLIMSOLL_BINARY": os.environ["PLIMSOLL"], "PLIMSOLL_PLATFORM": sysconfig.get_platform().replace("-", "_").replace(".", "_"),
        "PLIMSOLL_NOTICES": str(tmp_path / "NOTICES.txt"), "PLIMSOLL_GHOST": str(tmp_path / "ghost.so"),
    }  # fmt: skip
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, PACKAGE]
    subprocess.run(build, check=True, env={**os.environ, **program})
    (wheel,) = tmp_path.glob("plimsoll_training-*.whl")
    place = tmp_path / "place"
    if target:
        subprocess.run([*pip, "install", "--no-deps", "--target", place, wheel], check=True)
        python, paths = sys.executable, str(place)
    else:
        venv.create(place, with_pip=False)
        python, paths = place / "bin" / "python", ""
        subprocess.run([*pip, "--python", python, "install", "--no-deps", wheel], check=True)
        (site,) = place.glob("lib/python*/site-packages")
        (site / "these.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run = [python, "-c", SELF_CONTAINED + STEP, place]
    subprocess.run(run, check=True, cwd=tmp_path, env={"PATH": "/nonexistent", "HOME": str(tmp_path), "PYTHONPATH": paths})


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
    subprocess.run([environment / "bin" / "python", "-c", PROGRAM + STEP], check=True, cwd=tmp_path, env=clean)
