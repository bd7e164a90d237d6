"""Makes docs/gpu.md of results: one section for each machine, and tables that say "not yet measured" without any."""

import argparse
import pathlib
import sys
from typing import Any, Dict, Iterable, List, Optional

from gpu_proof import parts, results

FOLDER = pathlib.Path(__file__).resolve().parent
NOT_YET = "not yet measured"
Cells = List[str]


# Numbers


def gib(size: Optional[float]) -> str:
    return "" if size is None else f"{size / 2**30:.2f}"


def gb_per_second(rate: Optional[float]) -> str:
    return "" if rate is None else f"{rate / 1e9:.1f}"


def milliseconds(seconds: Optional[float]) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def size_of(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count} B"


def off(planned: Optional[float], measured: Optional[float]) -> str:
    """By how much a plan is off, in percent of what was measured."""
    return f"{(planned / measured - 1) * 100:+.1f} %" if planned and measured else ""


# Tables


def table(titles: str, rows: Iterable[Cells]) -> List[str]:
    """A table of Markdown. ``titles`` are separated by bars."""
    names = [name.strip() for name in titles.split("|")]
    lines = [row_of(names), row_of(["---"] * len(names))]
    body = [row_of(row) for row in rows]
    return [*lines, *(body or [row_of([NOT_YET] + [""] * (len(names) - 1))]), ""]


def row_of(cells: Iterable[str]) -> str:
    return "| " + " | ".join(text_of(cell) for cell in cells) + " |"


def text_of(cell: Any) -> str:
    return str(cell).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


class Results:
    """The results of one machine."""

    def __init__(self, lines: List[results.Line]):
        self.machine = results.machine(lines) or {}
        self._lines = {line["part"]: line for line in lines}  # the last one counts

    def of(self, worker: str) -> List[results.Line]:
        """The lines of a worker, in the order of the parts."""
        names = [part.name for part in parts.all_parts() if part.worker == worker]
        return [self._lines[name] for name in names if name in self._lines]

    def found(self, part: str) -> Dict[str, Any]:
        return self._lines.get(part, {}).get("found") or {}

    def bad(self) -> List[results.Line]:
        names = [part.name for part in parts.all_parts()]
        good = (results.HOLDS, results.LEFT_OUT)
        return [self._lines[n] for n in names if n in self._lines and self._lines[n]["outcome"] not in good]

    def missing(self) -> List[str]:
        return [part.name for part in parts.all_parts() if part.name not in self._lines]


def correctness(of: Results) -> List[str]:
    def row(line: results.Line) -> Cells:
        found = line.get("found", {})
        differing = "" if "differing" not in found else f"{found['differing']:,} of {found['elements']:,}"
        return [line["part"].replace("correctness/", ""), line["outcome"], differing, found.get("against", "")]

    lines = of.of("correctness") + of.of("sanitizer")
    return table("training | result | elements that differ | beside", map(row, lines))


def copies(of: Results) -> List[str]:
    rows = of.found("rates/copies").get("rows", [])
    cells = (
        [r["memory"], size_of(r["bytes"]), *(gb_per_second(r[k]) for k in ("to_device", "to_host", "both_added"))]
        for r in rows
    )
    return table("host memory | size | to the GPU, GB/s | back, GB/s | both at once, added, GB/s", cells)


def registration(of: Results) -> List[str]:
    rows = of.found("rates/registration").get("rows", [])
    keys = ("touch_seconds", "register_seconds", "unregister_seconds", "pin_memory_seconds")
    cells = ([size_of(r["bytes"]), *(milliseconds(r[k]) for k in keys)] for r in rows)
    return table("size | touch, ms | register, ms | unregister, ms | torch's pin_memory, ms", cells)


def host(of: Results) -> List[str]:
    found = of.found("rates/host")
    cells = (
        [
            [
                f"{found['parameters']:,}",
                str(found["workers"]),
                gb_per_second(found["update_bytes_per_second"]),
                gb_per_second(found["limit_bytes_per_second"]),
            ]
        ]
        if found
        else []
    )
    return table("parameters | workers | AdamW on the host, GB/s | memory alone, GB/s", cells)


ENGINE_NAMES = {
    "torch-fused": "torch's fused AdamW on the GPU",
    "none": "AdamW",
    "forward": 'AdamW, overlap "forward"',
    "backward": 'AdamW, overlap "backward"',
    "async": "AdamW, one step late",
    "offload-chunked": "StateOffload, chunked",
    "offload-whole": "StateOffload, whole",
    "torchao": "torchao's CPUOffloadOptimizer",
}


def steps(of: Results) -> List[str]:
    def row(line: results.Line) -> Cells:
        _, size, engine = line["part"].split("/")
        found = line.get("found") or {}
        if not found:
            return [size, ENGINE_NAMES[engine], line["outcome"], "", "", "", ""]
        times = (milliseconds(found[k]) for k in ("passes_seconds", "step_seconds", "exposed_seconds", "law_seconds"))
        return [size, ENGINE_NAMES[engine], f"{found['parameters']:,}", *times]

    return table(
        "model | optimizer | parameters | passes alone, ms | step, ms | exposed, ms | by the law, ms",
        map(row, of.of("steps")),
    )


def name_of(line: results.Line) -> str:
    return line["part"].split("/", 1)[1]


def highest(figures: Optional[Dict[str, Any]], key: str) -> Optional[int]:
    phases = (figures or {}).get("phases", {})
    return max((phase[key] for phase in phases.values() if phase.get(key) is not None), default=None)


def peaks(of: Results) -> List[str]:
    """The highest of all phases, as torch reserves it: what decides whether a job fits."""

    def row(line: results.Line) -> Cells:
        planned, measured = of.found("plans/" + name_of(line)), line.get("found") or {}
        real = highest(measured, "peak_reserved")
        flags, ghost = (highest(planned.get(way), "peak_reserved") for way in ("flags", "ghost"))
        ran_out = "ran out" if measured.get("out_of_memory") else gib(real)
        plans = [
            text
            for figure in (flags, ghost)
            for text in (gib(figure), "" if "out_of_memory" in measured else off(figure, real))
        ]
        return [name_of(line), str(measured.get("batch", "")), ran_out if measured else line["outcome"], *plans]

    return table(
        "job | batch | reserved, GiB | by flags, GiB | off | by its program, GiB | off", map(row, of.of("truth"))
    )


PHASES = ["load", "forward/first", "backward/first", "step/first", "forward/steady", "backward/steady", "step/steady"]


def phases(of: Results) -> List[str]:
    """By how much the plan of the program is off in each phase, of what torch has allocated at the most."""

    def row(line: results.Line) -> Cells:
        planned = (of.found("plans/" + name_of(line)).get("ghost") or {}).get("phases", {})
        measured = (line.get("found") or {}).get("phases", {})
        pairs = ((planned.get(p, {}).get("peak_allocated"), measured.get(p, {}).get("peak_allocated")) for p in PHASES)
        return [name_of(line), *(off(*pair) for pair in pairs)]

    return table(" | ".join(["job", *PHASES]), map(row, of.of("truth")))


def beside(of: Results) -> List[str]:
    """What is no matter of torch's allocator: context and libraries, the host, and time."""

    def row(line: results.Line) -> Cells:
        planned, measured = of.found("plans/" + name_of(line)), line.get("found") or {}
        flags = planned.get("flags") or {}
        smi = measured.get("used") and measured["used"] - (measured.get("used_before") or 0)
        expected = flags.get("step_seconds") or {}
        interval = f"{milliseconds(expected['least'])} to {milliseconds(expected['most'])}" if expected else ""
        return [
            name_of(line),
            gib(smi),
            gib(measured.get("outside")),
            gib((planned.get("ghost") or {}).get("outside")),
            gib((measured.get("host") or {}).get("peak")),
            gib((planned.get("ghost") or {}).get("host")),
            milliseconds(measured.get("step_seconds")),
            milliseconds(expected.get("expected")),
            interval,
        ]

    return table(
        "job | nvidia-smi, GiB | beside torch, GiB | planned, GiB | host, GiB | planned, GiB | step, ms | planned, ms "
        "| from, to, ms",
        map(row, of.of("truth")),
    )


def block(text: str) -> List[str]:
    return ["```text", *text.rstrip().splitlines(), "```", ""] if text else []


def diagnosis(of: Results) -> List[str]:
    titles = {
        "diagnosis/topology": "`plimsoll topology`",
        "diagnosis/out-of-memory": "`plimsoll explain` of the log of `llama-runs-out`",
        "diagnosis/recording": "`plimsoll compare`: 30 seconds of `llama-checkpointing` beside its plan",
    }
    text = table("part | result", ([titles[line["part"]], line["outcome"]] for line in of.of("diagnosis")))
    for part, key in (("diagnosis/out-of-memory", "log"), ("diagnosis/recording", "compare")):
        answer = of.found(part).get(key)
        if answer:
            text += [titles[part] + ":", "", *block(answer)]
    return text


def troubles(of: Results) -> List[str]:
    bad = of.bad()
    if not bad:
        return []
    rows = ([line["part"], line["outcome"], (line.get("said") or "").strip().splitlines()[-1:] or [""]] for line in bad)
    return [
        "### Parts that are not as expected",
        "",
        *table("part | result | said", ([a, b, c[0][:200]] for a, b, c in rows)),
    ]


SECTIONS: List[tuple] = [
    ("Bits", "bits.md", [correctness]),
    ("Rates", "rates.md", [copies, registration, host]),
    ("Steps", "steps.md", [steps]),
    ("Plans beside what was measured", "truth.md", [peaks, phases, beside]),
    ("Diagnosis", "diagnosis.md", [diagnosis]),
]


def facts(of: Results) -> List[str]:
    machine = of.machine
    if not machine:
        return table("card | driver | host | releases | date | commit", [])
    releases = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    cells = [
        f"{machine['card']}, {gib(machine['card_bytes'])} GiB",
        machine["driver"],
        f"{machine['cpus']} CPUs, {gib(machine['host_bytes'])} GiB",
        releases,
        machine["date"],
        machine["commit"],
    ]
    return table("card | driver | host | releases | date | commit", [cells])


def section(of: Results, level: str) -> List[str]:
    text = facts(of)
    if of.machine.get("dry"):
        text += ["**A dry run: these figures are of a CPU that plays a GPU, and say nothing of any card.**", ""]
    for title, introduction, tables in SECTIONS:
        text += [f"{level} {title}", "", *(FOLDER / "text" / introduction).read_text().splitlines(), ""]
        for make in tables:
            text += make(of)
    text += troubles(of)
    if of.machine and of.missing():
        text += [f"{len(of.missing())} parts were not yet run on this card, the first of them `{of.missing()[0]}`.", ""]
    return text


def page(all_results: List[List[results.Line]]) -> str:
    text = (FOLDER / "text" / "head.md").read_text().splitlines() + [""]
    if not all_results:
        text += ["## Results: none yet", "", "Nothing was run on a GPU yet. These are the tables that a run fills.", ""]
        text += section(Results([]), "###")
    for lines in all_results:
        of = Results(lines)
        text += [f"## {of.machine['card']}, {of.machine['date']}", "", *section(of, "###")]
    return "\n".join(text).rstrip() + "\n"


def main(arguments: List[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-page", description="Writes docs/gpu.md from results of scripts/gpu-proof."
    )
    parser.add_argument("--write", type=pathlib.Path, help="file to write (default: print)")
    parser.add_argument(
        "results", nargs="*", type=pathlib.Path, help="results (default: all of scripts/gpu_proof/measured)"
    )
    given = parser.parse_args(arguments)
    paths = given.results or sorted((FOLDER / "measured").glob("*.jsonl"))
    try:
        for path in paths:
            if not path.exists():
                raise results.BadResults(
                    f"{path}: found no file, expected results of scripts/gpu-proof: check the name"
                )
        every = [results.read(path) for path in paths]
        for path, lines in zip(paths, every):
            if results.machine(lines) is None:
                raise results.BadResults(f"{path}: found no line of the machine, expected results of scripts/gpu-proof")
    except results.BadResults as error:
        print(error, file=sys.stderr)
        return 2
    text = page(every)
    if given.write:
        given.write.write_text(text)
    else:
        print(text, end="")
    return 0
