"""What the package never does: kill by name, run a shell, swallow errors, name a machine's paths or a registry."""

import ast
import re

import pytest

from tests.architecture.sources import (
    PACKAGE,
    dotted_name,
    name_of,
    project_files,
    python_files,
    tree_of,
)

FORBIDDEN_CALLS = {
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "eval",
    "exec",
}
# Short processes go through `process`; children that live long belong to `node.supervise`.
SUBPROCESS_FILES = {"miles_hpc/process.py", "miles_hpc/node/supervise.py"}
# The agent's outermost frame writes a node_failed event and raises the error again.
BLIND_EXCEPT_FILES = {"miles_hpc/node/entry.py"}
FORBIDDEN_MODULE_WORDS = {
    "base",
    "common",
    "handler",
    "handlers",
    "helper",
    "helpers",
    "manager",
    "misc",
    "util",
    "utils",
}
# The vocabulary of docs/design.md: one word per idea, so these name nothing of ours.
FORBIDDEN_WORDS = {
    "framework",
    "helper",
    "hybrid",
    "master",
    "mbs",
    "misc",
    "slave",
    "teacher",
    "trajectory",
    "utils",
}


def package_trees():
    return [(name_of(path), tree_of(path)) for path in python_files("miles_hpc")]


def test_the_package_runs_no_shell_and_evaluates_no_text():
    found = []
    for name, tree in package_trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            if dotted_name(node.func) in FORBIDDEN_CALLS:
                found.append(f"{name}:{node.lineno} {dotted_name(node.func)}")
            for keyword in node.keywords:
                if keyword.arg == "shell" and ast.unparse(keyword.value) != "False":
                    found.append(f"{name}:{node.lineno} shell={ast.unparse(keyword.value)}")
    assert found == []


def test_processes_are_started_in_two_files_only():
    exceptions = {"subprocess.CalledProcessError", "subprocess.TimeoutExpired"}
    found = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name, tree in package_trees()
        for node in ast.walk(tree)
        if name not in SUBPROCESS_FILES
        and (
            (isinstance(node, ast.ImportFrom) and node.module == "subprocess")
            or (
                isinstance(node, ast.Attribute)
                and dotted_name(node).startswith(
                    ("subprocess.", "os.spawn", "os.posix_spawn", "os.fork")
                )
                and dotted_name(node) not in exceptions
            )
        )
    ]
    assert found == []


def test_no_process_is_matched_by_name():
    pattern = re.compile(r"\b(pkill|killall)\b|kill -9|\bray stop\b|['\"]stop['\"], ['\"]--force")
    found = [
        f"{name}:{node.lineno} {node.value!r}"
        for name, tree in package_trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and pattern.search(node.value)
        and not _is_docstring(tree, node)
    ]
    assert found == []


def _is_docstring(tree: ast.Module, constant: ast.Constant) -> bool:
    return any(isinstance(node, ast.Expr) and node.value is constant for node in ast.walk(tree))


def test_errors_are_caught_by_their_kind():
    found = [
        f"{name}:{node.lineno}"
        for name, tree in package_trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and name not in BLIND_EXCEPT_FILES
        and _is_blind(node)
        and not _cleans_up_and_raises_again(node)
    ]
    assert found == []


def _is_blind(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {dotted_name(part) for part in ast.walk(handler.type) if isinstance(part, ast.expr)}
    return bool(names & {"Exception", "BaseException"})


def _cleans_up_and_raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_no_wait_is_a_fixed_sleep_above_a_tenth_of_a_second():
    found = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name, tree in package_trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and dotted_name(node.func) in {"time.sleep", "sleep", "asyncio.sleep"}
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and node.args[0].value > 0.1
    ]
    assert found == []


def test_modules_are_named_for_what_they_hold():
    found = [
        name_of(path)
        for path in PACKAGE.rglob("*.py")
        if FORBIDDEN_MODULE_WORDS & set(path.stem.split("_"))
    ]
    assert found == []


def _defined_names(tree: ast.Module):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno


def test_names_use_the_words_of_the_vocabulary():
    found = [
        f"{name}:{line} {identifier}"
        for name, tree in package_trees()
        for identifier, line in _defined_names(tree)
        if FORBIDDEN_WORDS
        & set(re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", identifier).lower()))
    ]
    assert found == []


# Written in two halves, so that this file does not hold what it looks for.
HOSTS = ["py" + "pi.org", "python" + "hosted.org", "registry.npm" + "js", "deb." + "debian.org"]
HOSTS += ["download.py" + "torch.org", "index.cr" + "ates.io", "cache.nix" + "os.org"]
MACHINE_PATHS = ["/wo" + "rk/", "/ro" + "ot/.pyenv", "/opt/" + "wheels", "/tmp/" + "brief"]


@pytest.mark.parametrize("text", HOSTS + MACHINE_PATHS)
def test_no_file_names_a_registry_or_a_path_of_one_machine(text):
    found = [
        f"{name_of(path)}:{number}"
        for path in project_files()
        for number, line in enumerate(_lines_of(path), 1)
        if text in line
    ]
    assert found == []


def _lines_of(path):
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []
