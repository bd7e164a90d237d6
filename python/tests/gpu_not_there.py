"""A GPU of 1 GiB that is not there: PyTorch is the stock one for CUDA, and the errors are its own."""

import os
import shutil
import subprocess

import pytest

from gpt import ROOT

CAPACITY = 1 << 30


@pytest.fixture(scope="session")
def gpu(tmp_path_factory):
    """The environment in which PyTorch uses the library that stands in for CUDA."""
    if shutil.which("cc") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("there is no C compiler for the library that stands in for CUDA")
        pytest.skip("there is no C compiler for the library that stands in for CUDA")
    folder = tmp_path_factory.mktemp("library")
    path = folder / "libcuda.so.1"
    sources = sorted(str(p) for p in (ROOT / "internal/run/ghost/library").glob("*.c"))
    subprocess.run(["cc", "-shared", "-fPIC", "-fvisibility=hidden", "-o", path, *sources, "-ldl", "-lpthread"], check=True)
    for name in ("libcuda.so", "libnvidia-ml.so.1"):
        (folder / name).symlink_to(path)
    settings = dict(DEVICES=1, CAPACITY=CAPACITY, MAJOR=9, MINOR=0, PROCESSORS=132, EARLY=0, NAME="none", CONTEXT=100 << 20)
    return {"LD_PRELOAD": str(path), "LD_LIBRARY_PATH": str(folder), **{f"PLIMSOLL_GHOST_{k}": str(v) for k, v in settings.items()}}
