"""The cut of the package: modules import those above them, and no class holds too much."""

import ast
import re

import pytest

from gpt import ROOT

PACKAGE = ROOT / "python" / "plimsoll"
LONGEST_OPTIMIZER = 400  # lines
MOST_ATTRIBUTES = 15  # private ones of a class


def classes():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield pytest.param(node, id=f"{path.relative_to(PACKAGE)}:{node.name}")


@pytest.mark.parametrize("node", list(classes()))
def test_private_attributes(node):
    targets = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    held = {t.attr for t in targets if isinstance(t.value, ast.Name) and t.value.id == "self" and t.attr.startswith("_")}
    assert len(held) <= MOST_ATTRIBUTES, f"{node.name} has {len(held)} private attributes, {sorted(held)}: cut it in two"


def test_optimizer_delegates():
    lines = len((PACKAGE / "torch" / "optimizer.py").read_text().splitlines())
    assert lines < LONGEST_OPTIMIZER, f"optimizer.py has {lines} lines: what is new belongs into one of the modules it is made of"


def test_modules_import_those_above_them():
    """As docs/architecture.md lists them."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = re.search(r"## The Python client\n(.*?)\n## ", text, re.DOTALL)[1]
    listed = re.findall(r"`([a-z_]+)`(?=[,:])", section)
    modules = {path.stem for path in (PACKAGE / "torch").glob("*.py")} - {"__init__"}
    assert sorted(listed) == sorted(modules)
    for name in listed:
        tree = ast.parse((PACKAGE / "torch" / f"{name}.py").read_text())
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        used = {n.module.split(".")[2] for n in imports if n.module and n.module.startswith("plimsoll.torch.")}
        used |= {alias.name for n in imports if n.module == "plimsoll.torch" for alias in n.names}
        below = sorted(u for u in used if listed.index(u) >= listed.index(name))
        assert not below, f"{name} imports {', '.join(below)}, which stand below it in docs/architecture.md"
