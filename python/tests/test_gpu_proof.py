"""The proof on a GPU, without one: what is run once, what is named when it fails, and the page of its results."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from gpu_proof import cards, driver, page, parts, results  # noqa: E402

TESTDATA = ROOT / "scripts" / "gpu_proof" / "testdata"

WORKER = """
import os, signal, time

def run(case):
    with open(os.environ["RAN"], "a") as file:
        file.write(case + "\\n")
    if case.startswith("slow"):
        time.sleep(0.3)
    if case == "raises":
        raise ValueError("found no card")
    if case == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "hangs":
        time.sleep(1000)
    return {"case": case, "holds": case != "differs"}
"""

PROGRAM = """
import pathlib, sys
sys.path.insert(0, {scripts!r})
from gpu_proof import driver, parts

catalog = [parts.Part("fake/" + name, 1.5 if name == "hangs" else 30) for name in {names!r}]
catalog += [parts.Part("fake/host-" + name, 30, parts.HOST) for name in {host!r}]
settings = driver.Settings(pathlib.Path({results!r}), {limit!r}, True, False, [], lambda: catalog, "fakes")
driver.prepare(settings)
print(len(driver.run_parts(settings)))
"""


class Proof:
    """A proof of made-up parts, in a process of its own."""

    def __init__(self, folder, names, host=(), limit=120.0):
        (folder / "fakes").mkdir()
        (folder / "fakes" / "__init__.py").touch()
        (folder / "fakes" / "fake.py").write_text(WORKER)
        self.results, self._ran = folder / "results.jsonl", folder / "ran"
        values = dict(
            scripts=str(ROOT / "scripts"), names=list(names), host=list(host), results=str(self.results), limit=limit
        )
        self._command = [sys.executable, "-c", PROGRAM.format(**values)]
        self._environment = {**os.environ, "PYTHONPATH": str(folder), "RAN": str(self._ran)}

    def start(self):
        return subprocess.Popen(self._command, env=self._environment, stdout=subprocess.PIPE, text=True)

    def run(self):
        """The number of parts that are left."""
        out, _ = (process := self.start()).communicate(timeout=120)
        assert process.returncode == 0, out
        return int(out.splitlines()[-1])

    def lines(self):
        return [line for line in results.read(self.results) if line["part"] != "machine"]

    def ran(self):
        return self._ran.read_text().split() if self._ran.exists() else []


def test_a_proof_that_is_killed_goes_on(tmp_path):
    """Nothing with a result is run twice, and no result is lost."""
    names = [f"slow{i}" for i in range(8)]
    proof = Proof(tmp_path, names, host=["slow-a", "slow-b"])
    process = proof.start()
    deadline = time.monotonic() + 120
    while len(proof.lines()) < 4:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {line["part"] for line in proof.lines()}
    with open(proof.results, "ab") as file:
        file.write(b'{"part": "fake/slow7", "outc')  # as a kill in the middle of a write leaves it
    assert 4 <= len(before) < 10
    assert proof.run() == 0
    said = [line["part"] for line in proof.lines()]
    assert sorted(said) == sorted(["fake/" + name for name in names] + ["fake/host-slow-a", "fake/host-slow-b"])
    assert all(proof.ran().count(part.split("/")[1]) == 1 for part in before)
    assert results.machine(results.read(proof.results))["dry"]


def test_parts_that_fail_are_named_and_the_others_run_on(tmp_path):
    proof = Proof(tmp_path, ["first", "raises", "differs", "dies", "hangs", "last"])
    assert proof.run() == 0
    outcomes = {line["part"].split("/")[1]: line for line in proof.lines()}
    assert {name: line["outcome"] for name, line in outcomes.items()} == {
        "first": results.HOLDS,
        "raises": results.FAILED,
        "differs": results.DIFFERS,
        "dies": results.FAILED,
        "hangs": results.EXCEEDED,
        "last": results.HOLDS,
    }
    assert outcomes["raises"]["said"] == "ValueError: found no card"
    assert outcomes["dies"]["said"].endswith("signal 9")
    assert outcomes["hangs"]["said"].startswith("1.5 s")


def test_the_limit_of_a_run_leaves_parts_for_the_next(tmp_path):
    proof = Proof(tmp_path, ["first", "slow"] + ["hangs"] * 1, limit=0.0)
    assert proof.run() == 3 and proof.lines() == []


def test_a_worker_that_cannot_begin_fails_each_of_its_parts(tmp_path):
    proof = Proof(tmp_path, ["first", "last"])
    (tmp_path / "fakes" / "fake.py").write_text("import nothing_of_this_name")
    assert proof.run() == 0
    assert [line["outcome"] for line in proof.lines()] == [results.FAILED] * 2
    assert all("nothing_of_this_name" in line["said"] for line in proof.lines())


def test_results_of_another_card_are_not_gone_on_with(tmp_path):
    settings = driver.Settings(tmp_path / "results.jsonl", 10, True, False, [])
    driver.prepare(settings)
    driver.prepare(settings)
    line = results.machine(results.read(settings.results))
    settings.results.write_text(json.dumps({**line, "card": "NVIDIA L4"}) + "\n")
    with pytest.raises(results.BadResults, match="found results with card 'NVIDIA L4', and this run has 'NVIDIA H200'"):
        driver.prepare(settings)


@pytest.mark.parametrize("text", ["no JSON\n", "[]\n", '{"outcome": "holds"}\n'])
def test_files_that_are_no_results(tmp_path, text):
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(results.BadResults, match="results.jsonl:1: found .* expected a JSON object with a part"):
        results.read(path)


def test_results_name_no_folder_of_this_machine():
    settings = driver.Settings(pathlib.Path("/srv/out.jsonl"), 10, True, False, [])
    line = {
        "part": "a",
        "found": {"text": f"{sys.executable} {ROOT}/scripts/x /tmp/tmpab12/plan.json /srv/out.scratch/a"},
    }
    assert driver.without_paths(line, settings)["found"]["text"] == "python scripts/x plan.json a"


def test_names_of_cards():
    known = [
        dict(name=n, memory_bytes=b << 30)
        for n, b in [("H200", 140), ("H100-80GB", 79), ("H100-94GB", 93), ("RTX-4090", 24)]
    ]
    assert cards.named("NVIDIA H200", 141 << 30, known) == "H200"
    assert cards.named("NVIDIA H100 80GB HBM3", 80 << 30, known) == "H100-80GB"
    assert cards.named("NVIDIA H100 NVL", 94 << 30, known) == "H100-94GB"
    assert cards.named("NVIDIA GeForce RTX 4090", 24 << 30, known) == "RTX-4090"
    assert cards.named("NVIDIA X1", 24 << 30, known) is None


def test_parts_have_names_of_their_own_and_fit_a_run():
    every = parts.all_parts()
    assert len({part.name for part in every}) == len(every) > 90
    assert every[0].lane == parts.HOST and sum(part.worker == "truth" for part in every) == 16


def test_the_page_of_results(tmp_path):
    """testdata/page.md is the page of testdata/results.jsonl: scripts/gpu-page --write writes it again."""
    written = tmp_path / "page.md"
    assert page.main(["--write", str(written), str(TESTDATA / "results.jsonl")]) == 0
    assert written.read_text() == (TESTDATA / "page.md").read_text()


def test_the_page_of_this_repository_is_that_of_its_results(tmp_path):
    written = tmp_path / "gpu.md"
    assert page.main(["--write", str(written)]) == 0
    assert written.read_text() == (ROOT / "docs" / "gpu.md").read_text(), "make gpu-page writes it"


def test_a_page_without_results_says_so():
    text = page.page([])
    assert text.count(page.NOT_YET) == 10 and "none yet" in text and "make gpu-proof" in text


def test_a_page_of_no_results(tmp_path, capsys):
    assert page.main([str(tmp_path / "missing.jsonl")]) == 2
    assert "found no file, expected results of scripts/gpu-proof" in capsys.readouterr().err
