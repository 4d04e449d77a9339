"""env/bootstrap.sh says clearly what it cannot do, before it changes anything."""

import os
import subprocess

import pytest

from tests.architecture.sources import ROOT

SCRIPT = ROOT / "env" / "bootstrap.sh"


def bootstrap(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", str(SCRIPT), *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("arguments", [(), ("tests",)])
def test_an_unknown_command_names_the_ones_there_are(arguments):
    done = bootstrap(*arguments)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "error: expected one of: demo test venv cpu gpu login"
    )


def test_help_lists_every_command():
    done = bootstrap("--help")
    assert done.returncode == 0
    for command in ("demo", "test", "venv", "cpu", "gpu", "login"):
        assert f"env/bootstrap.sh {command}" in done.stdout


@pytest.fixture
def bare_path(tmp_path):
    """A PATH with the tools of any machine, and no Python."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("cat", "dirname", "sed", "sha256sum", "cut", "id"):
        (tools / name).symlink_to(f"/usr/bin/{name}")
    return str(tools)


def test_a_machine_without_python_gets_one_clear_message(bare_path, tmp_path):
    done = bootstrap("login", PATH=bare_path, MILES_HPC_VENV=str(tmp_path / "venv"))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: no Python 3.11 or 3.12 with the venv module is on PATH")
    assert not (tmp_path / "venv").exists()


def test_a_python_of_another_version_is_refused_by_name(tmp_path):
    other = tmp_path / "python3.9"
    other.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    other.chmod(0o755)
    venv = tmp_path / "venv"
    done = bootstrap("login", MILES_HPC_PYTHON=str(other), MILES_HPC_VENV=str(venv))
    assert done.returncode == 1
    assert f"MILES_HPC_PYTHON={other} is not Python 3.11 or 3.12" in done.stderr
    assert not venv.exists()


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path):
    venv = tmp_path / "my files"
    venv.mkdir()
    (venv / "thesis.tex").write_text("years of work", encoding="utf-8")
    done = bootstrap("login", MILES_HPC_VENV=str(venv))
    assert done.returncode == 1
    assert "is not a virtual environment" in done.stderr
    assert (venv / "thesis.tex").read_text(encoding="utf-8") == "years of work"
