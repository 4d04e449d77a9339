"""The wheel holds the package, env/ and jobs/, and nothing of the tests; `paths.packaged` finds them inside it."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, name_of, project_files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the wheel from a copy, so that no build folder appears in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for path in project_files():
        if not name_of(path).startswith("tests/"):
            target = source / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    output = tmp_path_factory.mktemp("wheel")
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    argv += ["--no-deps", "--no-build-isolation", "--wheel-dir", str(output), str(source)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = output.glob("miles_hpc-*.whl")
    return built


def test_the_wheel_holds_the_package_and_its_data_alone(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        name_of(path) if folder == "miles_hpc" else f"miles_hpc/data/{name_of(path)}"
        for path in project_files()
        for folder in [name_of(path).split("/")[0]]
        if (folder == "miles_hpc" and path.suffix == ".py") or folder in ("env", "jobs")
    }
    assert expected - names == set()
    assert {name for name in names - expected if ".dist-info/" not in name} == set()


def test_packaged_folders_are_found_inside_an_installed_wheel(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = "from miles_hpc import paths; print(paths.packaged('jobs'), paths.packaged('env'))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    data = tmp_path / "miles_hpc" / "data"
    assert done.stdout.split() == [str(data / "jobs"), str(data / "env")]
    assert (data / "jobs" / "demo.toml").is_file()


def test_the_recipes_are_found_inside_an_installed_wheel(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    spec = tmp_path / "mine.toml"
    for arguments in (["jobs", "--json"], ["init", "qwen3_4b", "-o", str(spec)]):
        done = subprocess.run(
            [sys.executable, "-m", "miles_hpc", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        if arguments[0] == "jobs":
            names = [entry["name"] for entry in json.loads(done.stdout)["recipes"]]
    assert names == sorted(path.stem for path in (ROOT / "jobs").glob("*.toml"))
    assert 'extends = "recipe:qwen3_4b"' in spec.read_text()


def test_packaged_folders_are_found_in_a_checkout():
    from miles_hpc import paths

    assert paths.packaged("jobs") == ROOT / "jobs"
    assert paths.packaged("env") == ROOT / "env"
