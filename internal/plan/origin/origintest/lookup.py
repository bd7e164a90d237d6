"""Looks the places of internal/plan/origin/places.csv up in the releases of internal/plan/origin/releases.csv, which it downloads from PyPI.

A place has to be there in the releases from "since" on, and not in those from "until" on or before "since". Releases
stay in the folder of the first argument.
"""

import csv
import pathlib
import subprocess
import sys
import tarfile
import zipfile

import places

folder = pathlib.Path(sys.argv[1])
tables = pathlib.Path(__file__).parent.parent
# A wheel for macOS has the same Python files and headers as one for Linux, without CUDA's libraries.
MACOS = ["--only-binary=:all:", "--no-deps"] + [
    f"--platform=macosx_{v}_arm64" for v in ("11_0", "12_0", "14_0")]


def pip(to, requirement, *options):
    return subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation",
                           "--dest", to, *options, requirement], capture_output=True, text=True)


def fetch(package, release):
    """Returns the folder with the sources of a release."""
    to = folder / f"{package}-{release}"
    if (to / "done").exists():
        return to
    to.mkdir(parents=True, exist_ok=True)
    ways = [MACOS + [f"--python-version={v}"] for v in ("3.12", "3.10")] if package == "torch" else [[]]
    for options in ways:
        done = pip(to, f"{package}=={release}", *options)
        if done.returncode == 0:
            break
    else:
        sys.exit(f"{package} {release} cannot be downloaded:\n{done.stderr}")
    for archive in [*to.glob("*.whl"), *to.glob("*.tar.gz")]:
        unpack(archive, to)
        archive.unlink()
    (to / "done").touch()
    return to


def unpack(archive, to):
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as z:
            z.extractall(to, [n for n in z.namelist() if n.endswith((".py", ".h"))])
        return
    with tarfile.open(archive) as t:
        t.extractall(to, [m for m in t.getmembers() if m.name.endswith((".py", ".h"))], filter="data")


def find(root, file):
    """Returns the path of a file: a source archive has a folder of its own, and perhaps a folder src in it."""
    for path in [root / file, *root.glob(f"*/{file}"), *root.glob(f"*/src/{file}")]:
        if path.is_file():
            return path
    return None


def number(release):
    return [int(n) for n in release.split(".")] + [0] * (3 - len(release.split(".")))


def check(row, release, root):
    since, until = row["since"], row["until"]
    expected = not (since and number(release) < number(since) or until and number(release) >= number(until))
    path = find(root, row["file"])
    found = path is not None and row["function"] in places.functions(path)
    if found != expected:
        return f"{row['project']} {release} {'has' if found else 'lacks'} {row['file']}, {row['function']}"
    return None


wrong, looked = [], 0
rows = list(csv.DictReader((tables / "places.csv").open()))
for project in csv.DictReader((tables / "releases.csv").open()):
    for release in project["releases"].split():
        root = fetch(project["package"], release)
        for row in rows:
            if row["project"] == project["project"] and row["file"] and "{" not in row["file"]:
                looked += 1
                wrong.append(check(row, release, root))
wrong = sorted(set(filter(None, wrong)))
print(*wrong, f"{looked} places looked up, {len(wrong)} wrong", sep="\n")
sys.exit(bool(wrong))
