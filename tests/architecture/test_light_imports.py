"""The login node imports no heavy library, the node agent nothing but the standard library, CPU tests no GPU library."""

import json
import pkgutil
import subprocess
import sys

import pytest

from tests.architecture.sources import (
    PACKAGE,
    ROOT,
    imports_at_module_scope,
    name_of,
    python_files,
    tree_of,
)

HEAVY = {
    "megatron",
    "numpy",
    "pandas",
    "peft",
    "ray",
    "reasoning_gym",
    "sglang",
    "submitit",
    "torch",
    "transformers",
}
GPU_LIBRARIES = {
    "cupy",
    "flash_attn",
    "flashinfer",
    "pynvml",
    "sgl_kernel",
    "sglang",
    "torch_memory_saver",
    "transformer_engine",
    "triton",
}
# A test folder that is about these imports them; elsewhere they would only make every run slow to start.
STACK = {"megatron", "peft", "ray", "torch", "transformers"}
STACK_FOLDERS = ("tests/bench/", "tests/gpu/", "tests/unit/trainer/", "tests/unit/probe/")


def modules_after(statement: str, *flags: str) -> set[str]:
    """Return the top-level names in sys.modules of a new interpreter after `statement`."""
    program = f"import sys; before = set(sys.modules); {statement}; import json; "
    program += "print(json.dumps(sorted({n.split('.')[0] for n in set(sys.modules) - before})))"
    done = subprocess.run(
        [sys.executable, *flags, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_command_line_loads_no_heavy_library():
    loaded = modules_after("import miles_hpc.cli")
    assert "miles_hpc" in loaded
    assert loaded & HEAVY == set()


NODE_MODULES = sorted(
    module.name for module in pkgutil.walk_packages([str(PACKAGE / "node")], "miles_hpc.node.")
)


@pytest.mark.parametrize("module", ["miles_hpc.node", *NODE_MODULES])
def test_the_node_agent_imports_only_the_standard_library(module):
    # -S keeps site-packages away altogether: what is not in the standard library fails to import.
    statement = f"import importlib; importlib.import_module({module!r})"
    loaded = modules_after(statement, "-S")
    assert loaded - set(sys.stdlib_module_names) == {"miles_hpc"}


def test_there_are_node_modules():
    assert "miles_hpc.node.entry" in NODE_MODULES


def test_no_module_that_a_cpu_machine_imports_needs_a_gpu_library():
    found = [
        f"{name_of(path)}:{line} {module}"
        for path in python_files("miles_hpc", "tests")
        if not name_of(path).startswith("tests/gpu/")
        for module, line in imports_at_module_scope(tree_of(path))
        if module.split(".")[0] in GPU_LIBRARIES
    ]
    assert found == []


def test_only_the_trainer_tests_import_the_training_stack_at_module_scope():
    found = [
        f"{name_of(path)}:{line} {module}"
        for path in python_files("tests")
        if not name_of(path).startswith(STACK_FOLDERS)
        for module, line in imports_at_module_scope(tree_of(path))
        if module.split(".")[0] in STACK
    ]
    assert found == []
