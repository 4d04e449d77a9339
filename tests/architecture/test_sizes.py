"""A module holds at most 400 lines and a function at most 60, so that each can be read at one sitting."""

import ast

from tests.architecture.sources import name_of, python_files, tree_of

# Benches are scripts that nobody imports: each stays whole in one file, whatever its length.
FOLDERS = (
    "miles_hpc",
    "env",
    "tests/architecture",
    "tests/flow",
    "tests/gpu",
    "tests/slurm",
    "tests/unit",
)
MODULE_LINES = 400
FUNCTION_LINES = 60


def test_no_module_is_longer_than_400_lines():
    sizes = {
        name_of(path): len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files(*FOLDERS)
    }
    assert sizes
    assert {name: size for name, size in sizes.items() if size > MODULE_LINES} == {}


def test_no_function_is_longer_than_60_lines():
    too_long = {
        f"{name_of(path)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in python_files(*FOLDERS)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES
    }
    assert too_long == {}


def test_every_module_says_what_it_is_for():
    silent = [
        name_of(path)
        for path in python_files("miles_hpc", "env")
        if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(tree_of(path))
    ]
    assert silent == []
