"""Reads pairs of a file and a function from stdin, as JSON, and prints those that the installed packages lack.

Files are parsed and not imported. A function is "name" or "Class.name"; in a header it is a word.
"""

import ast
import functools
import importlib.util
import json
import pathlib
import re
import sys


@functools.cache
def path_of(file):
    package, _, rest = file.partition("/")
    spec = importlib.util.find_spec(package)
    return pathlib.Path(spec.origin).parent / rest if spec else None


@functools.cache
def functions(path):
    if path.suffix != ".py":
        return set(re.findall(r"\w+", path.read_text()))
    names = set()

    def visit(body, prefix):
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(prefix + node.name)
            elif isinstance(node, ast.ClassDef):
                names.add(prefix + node.name)
                visit(node.body, prefix + node.name + ".")
            elif isinstance(node, (ast.If, ast.Try)):
                visit(node.body + node.orelse, prefix)

    visit(ast.parse(path.read_text()).body, "")
    return names


if __name__ == "__main__":
    for file, function in json.load(sys.stdin):
        path = path_of(file)
        if path is None or not path.is_file():
            print(f"{file}: there is no such file")
        elif function not in functions(path):
            print(f"{file}: there is no {function}")
