"""Slurm's commands as executables on PATH, so that submitit, this package and a shell all meet the same fake."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class FakeSlurm:
    """The answers to give and the calls that were made."""

    folder: Path

    def answer(self, verb: str, *, stdout: str = "", stderr: str = "", exit_code: int = 0) -> None:
        """Queue one more answer of `verb`; the last one goes on for ever."""
        number = len(list(self.folder.glob(f"{verb}.*"))) + 1
        content = {"stdout": stdout, "stderr": stderr, "exit_code": exit_code}
        (self.folder / f"{verb}.{number}").write_text(json.dumps(content))

    def calls(self, verb: str) -> list[dict]:
        """Return the calls of `verb`, oldest first."""
        path = self.folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [call for line in lines if (call := json.loads(line))["verb"] == verb]


@pytest.fixture
def fake_slurm(tmp_path_factory, clean_environ):
    """Put the fake commands first on PATH."""
    folder = tmp_path_factory.mktemp("slurm")
    clean_environ.setenv("PATH", f"{HERE / 'bin'}{os.pathsep}{os.environ['PATH']}")
    clean_environ.setenv("FAKE_SLURM_DIR", str(folder))
    clean_environ.setenv("FAKE_SLURM_PYTHON", sys.executable)
    clean_environ.setenv("FAKE_SLURM_PROGRAM", str(HERE / "program.py"))
    return FakeSlurm(folder)


@pytest.fixture
def no_slurm(tmp_path_factory, clean_environ):
    """A PATH without any Slurm command, but with what a shell needs."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("env", "sh", "bash"):
        (folder / name).symlink_to(f"/usr/bin/{name}")
    clean_environ.setenv("PATH", str(folder))
