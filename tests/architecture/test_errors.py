"""The drawn tree in errors.py, the classes and docs/errors.md say the same."""

import ast
import inspect
import re

from miles_hpc import errors
from tests.architecture.sources import ROOT, dotted_name, python_files, tree_of

LINE = re.compile(r"^( +)(\w+Error) +\[(\d+)\]  +(\S.*)$", re.M)


def drawn_tree(text: str) -> list[tuple[int, str, int, str]]:
    """Return (indent, class, exit code, meaning) of each line of the drawn tree."""
    return [
        (len(indent), name, int(code), meaning)
        for indent, name, code, meaning in LINE.findall(text)
    ]


def error_classes() -> list[type[errors.MilesHpcError]]:
    return [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, errors.MilesHpcError)
    ]


def test_the_tree_in_the_docstring_draws_every_class_with_its_exit_code():
    drawn = drawn_tree(errors.__doc__)
    assert [(name, code) for _, name, code, _ in drawn] == [
        (cls.__name__, cls.exit_code) for cls in error_classes()
    ]
    parents = {cls.__name__: cls.__base__.__name__ for cls in error_classes()}
    assert {name: parents[name] for indent, name, *_ in drawn if indent > drawn[0][0]} == {
        name: "MilesHpcError" for _, name, *_ in drawn[1:]
    }


def test_exit_codes_are_all_different():
    codes = [cls.exit_code for cls in error_classes()]
    assert len(set(codes)) == len(codes)
    assert 0 not in codes


def test_the_errors_page_draws_the_same_tree_and_explains_each_class():
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert drawn_tree(page) == drawn_tree(errors.__doc__)
    sections = dict(re.findall(r"^## (\w+)\n\nCode (\d+)\.", page, re.M))
    assert sections == {cls.__name__: str(cls.exit_code) for cls in error_classes()}


AGENT_CONTROL = {
    "HeadStoppedError",
    "NodeFailedError",
    "StoppedOnRequestError",
    "StopRequestedError",
}
"""How an attempt of a node agent ends; the verdict turns each into a state, so they have no place in the tree."""


def test_no_error_class_stands_outside_the_tree():
    found = {
        node.name
        for path in python_files("miles_hpc")
        if path.name != "errors.py"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        and any(dotted_name(base).endswith("MilesHpcError") for base in node.bases)
    }
    assert found == AGENT_CONTROL
