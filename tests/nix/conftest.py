"""A Nix with a store of its own and a checkout whose nixpkgs is the stub, so that nothing outside the test's folder is touched."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NIX = ROOT / ".nix-debian"
"""Where env/bootstrap.sh unpacks Nix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nix:
    """The commands of one Nix with a store below `folder`."""

    folder: Path
    stub: Path
    temp: Path

    @property
    def environ(self) -> dict[str, str]:
        nix = self.folder / "nix"
        return {
            "PATH": f"{NIX / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.temp),
            "NIX_CONF_DIR": str(NIX / "etc"),
            "NIX_STORE_DIR": str(nix / "store"),
            "NIX_STATE_DIR": str(nix / "var" / "nix"),
            "NIX_LOG_DIR": str(nix / "var" / "log" / "nix"),
            # A checkout that belongs to another user is no reason not to read it.
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
        }

    def run(
        self, *argv: str, cwd: Path = ROOT, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv,
            cwd=cwd,
            env={**self.environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

    def flake(
        self, command: str, *arguments: str, flake: Path = ROOT, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the flake, with the stub for nixpkgs; of it, what git would not ignore."""
        return self.run(
            "nix",
            *command.split(),
            "--no-write-lock-file",
            "--override-input",
            "nixpkgs",
            f"path:{self.stub}",
            *arguments,
            cwd=flake,
            **variables,
        )

    def build(self, output: str, flake: Path = ROOT) -> Path:
        """Return the store path of `output`."""
        done = self.flake("build --no-link --print-out-paths", f".#{output}", flake=flake)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def nix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nix]:
    """Nix, and a copy of the stub that finds this environment's tools."""
    assert (NIX / "bin" / "nix").exists(), f"no Nix in {NIX}: run env/nix/get-nix.sh {NIX}"
    folder = tmp_path_factory.mktemp("nix")
    (folder / "home").mkdir()
    stub = folder / "stub-nixpkgs"
    shutil.copytree(Path(__file__).parent / "stub-nixpkgs", stub)
    tools = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    (stub / "host.nix").write_text(f'"{tools}"\n', encoding="utf-8")
    # Short, as /build in Nix's sandbox is.
    with tempfile.TemporaryDirectory(prefix="nix-", dir="/tmp") as temp:
        yield Nix(folder=folder, stub=stub, temp=Path(temp))


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git checkout of the project as it stands here, committed or not: a flake sees only what git knows."""
    target = tmp_path_factory.mktemp("checkout")
    copy_checkout(target)
    return target


def copy_checkout(target: Path) -> None:
    """Copy what git does not ignore to `target` and add it to a new repository there."""
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for argv in (["git", "init", "--quiet"], ["git", "add", "--all"]):
        subprocess.run(argv, cwd=target, check=True, timeout=60, env=os.environ)


@pytest.fixture(scope="session")
def seeded(nix: Nix, wheel: Path) -> Nix:
    """Nix with the real NCCL wheel in its store, as it stands there after a download."""
    done = nix.run("nix-store", "--add-fixed", "sha256", str(wheel))
    assert done.returncode == 0, done.stderr
    return nix


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that env/nccl.toml pins, as pip gets it; its own digest is checked on the way."""
    folder = tmp_path_factory.mktemp("wheel")
    pins = (ROOT / "env" / "requirements" / "cpu.txt").read_text(encoding="utf-8")
    lines = [line for line in pins.splitlines() if line and not line.startswith("#")]
    start = next(
        number for number, line in enumerate(lines) if line.startswith("nvidia-nccl-cu13==")
    )
    end = next(n for n in range(start + 1, len(lines)) if not lines[n].startswith(" "))
    (folder / "nccl.txt").write_text("\n".join(lines[start:end]) + "\n", encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps",
            "--require-hashes", "--only-binary=:all:", "--dest", str(folder), "-r", str(folder / "nccl.txt"),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path
