"""The run folder as submission leaves it, and that a failure leaves nothing."""

import hashlib
import json
import py_compile
import re
import subprocess
import sys
from pathlib import Path

import pytest

import miles_hpc
from miles_hpc.errors import SubmitError
from miles_hpc.handoff import read_handoff
from miles_hpc.launch import bundle
from miles_hpc.launch.bundle import make_handoff, write_run_folder
from miles_hpc.launch.sbatch import render_sbatch
from miles_hpc.paths import RunDir
from miles_hpc.spec.job import JobSpec
from tests.fakes.recipes import ROOT, load_recipe


def files_of(root):
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def load(*overrides):
    return load_recipe(ROOT / "jobs" / "demo_tiny.toml", *overrides)


def load_in(run_root, *overrides):
    return load(f"job.run_root={json.dumps(str(run_root))}", *overrides)


def test_the_folder_holds_what_the_design_names(tmp_path):
    loaded, plan = load_in(tmp_path / "runs")
    run, handoff = write_run_folder(loaded, plan, cluster="slurm")
    assert re.fullmatch(r"demo-tiny-\d{8}-\d{6}", run.root.name)
    assert run.root.parent == tmp_path / "runs"
    assert read_handoff(run.handoff) == handoff
    assert run.sbatch_script.read_text() == render_sbatch(loaded.spec, run, handoff)
    written = json.loads(run.plan.read_text())
    assert written["hashes"] == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in run.spec.iterdir()
    }
    assert JobSpec.model_validate_json(json.dumps(written["spec"])) == loaded.spec
    assert not run.job.exists()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [run.root.name]


def test_the_code_is_frozen_whole(tmp_path):
    loaded, plan = load_in(tmp_path)
    run, _ = write_run_folder(loaded, plan, cluster="slurm")
    package = Path(miles_hpc.__file__).parent
    frozen = {name for name in files_of(run.code) if name.endswith(".py")}
    assert "miles_hpc/node/__main__.py" in frozen
    assert (run.code / "miles_hpc" / "cli.py").read_bytes() == (package / "cli.py").read_bytes()


def test_compiled_code_of_this_interpreter_alone_is_frozen_and_used(tmp_path, monkeypatch):
    package = tmp_path / "miles_hpc"
    (package / "launch").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    source = package / "part.py"
    source.write_text("print('from the source')")
    compiled = Path(py_compile.compile(str(source), doraise=True))
    for name in ("part.cpython-30.pyc", f"gone.{sys.implementation.cache_tag}.pyc"):
        (compiled.parent / name).write_bytes(b"")
    monkeypatch.setattr(bundle, "__file__", str(package / "launch" / "bundle.py"))
    bundle.freeze_code(tmp_path / "code")
    frozen = tmp_path / "code" / "miles_hpc"
    assert [path.name for path in (frozen / "__pycache__").iterdir()] == [compiled.name]
    script = "import miles_hpc.part, sys; print(sys.modules['miles_hpc.part'].__cached__)"
    done = subprocess.run(
        [sys.executable, "-P", "-v", "-c", script],
        env={"PYTHONPATH": str(tmp_path / "code")},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert f"{frozen}/__pycache__/{compiled.name} matches" in done.stderr


def test_two_folders_of_one_second_do_not_meet(tmp_path):
    loaded, plan = load_in(tmp_path)
    roots = {write_run_folder(loaded, plan, cluster="slurm")[0].root for _ in range(3)}
    assert len(roots) == 3


def test_two_writings_differ_by_their_name_alone(tmp_path):
    loaded, plan = load_in(tmp_path)
    contents = []
    for _ in range(2):
        run, _ = write_run_folder(loaded, plan, cluster="slurm")
        name = run.root.name.encode()
        contents.append(
            {key: data.replace(name, b"RUN") for key, data in files_of(run.root).items()}
        )
    assert contents[0] == contents[1]


def test_all_paths_are_absolute_and_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    loaded, plan = load_in("~/my runs")
    run, handoff = write_run_folder(loaded, plan, cluster="slurm")
    assert run.root.parent == tmp_path / "my runs"
    for path in (handoff.run_dir, handoff.code_dir, handoff.python):
        assert Path(path).is_absolute()
    assert "~" not in run.sbatch_script.read_text()


def test_an_output_folder_may_be_new_or_empty_and_is_taken_as_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded, plan = load_in(tmp_path / "unused")
    (tmp_path / "empty").mkdir()
    for name in ("-leading dash", "empty", "deep/er"):
        run, handoff = write_run_folder(loaded, plan, cluster="slurm", output=Path(name))
        assert run.root == tmp_path / name
        assert handoff.run_dir == str(tmp_path / name)
        assert run.sbatch_script.is_file()
    assert not (tmp_path / "unused").exists()


def test_an_output_folder_with_something_in_it_is_refused_and_kept(tmp_path):
    loaded, plan = load_in(tmp_path / "unused")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("precious")
    (tmp_path / "file").write_text("a file")
    for name in ("full", "file"):
        with pytest.raises(SubmitError, match="not an empty folder") as error:
            write_run_folder(loaded, plan, cluster="slurm", output=tmp_path / name)
        assert error.value.exit_code == 4
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "mine"]


def test_an_unwritable_root_is_one_message_and_nothing_is_left(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    loaded, plan = load_in(tmp_path / "file" / "runs")
    with pytest.raises(SubmitError, match=r"job\.run_root"):
        write_run_folder(loaded, plan, cluster="slurm")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failure_in_the_middle_removes_the_folders_it_made(tmp_path):
    loaded, plan = load_in(tmp_path / "new" / "root")
    # A name in spec/ that cannot be written stands for a disk that fills up half-way.
    object.__setattr__(loaded, "files", {"x" * 300: b""})
    with pytest.raises(SubmitError, match="run folder"):
        write_run_folder(loaded, plan, cluster="slurm")
    with pytest.raises(SubmitError, match="run folder"):
        write_run_folder(loaded, plan, cluster="slurm", output=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_environment_of_the_caller_is_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-4711")
    loaded, plan = load_in(tmp_path)
    run, _ = write_run_folder(loaded, plan, cluster="slurm")
    assert [name for name, data in files_of(run.root).items() if b"canary-4711" in data] == []


def test_the_handoff_says_what_the_spec_says(tmp_path):
    loaded, plan = load(
        "nccl.version=2.30.7",
        "agent.stop_grace=7s",
        "offload.scratch_min_free=1GiB",
        "network.interface=lo",
    )
    handoff = make_handoff(loaded.spec, plan, RunDir(tmp_path), cluster="local")
    assert handoff.nccl is not None
    assert handoff.nccl.version_code == 23007
    assert (handoff.stop_grace_s, handoff.scratch.min_free_bytes) == (7.0, 2**30)
    assert (handoff.cluster, handoff.num_nodes, handoff.ranks_per_node) == ("local", 2, 1)
    assert (handoff.interface, handoff.memory_bytes) == ("lo", 4 * 2**30)
    assert {entry.name: entry.value for entry in handoff.environment}["HF_HUB_OFFLINE"] == "1"


def test_without_preload_there_is_no_pin(tmp_path):
    loaded, plan = load("nccl.preload=false")
    assert make_handoff(loaded.spec, plan, RunDir(tmp_path), cluster="slurm").nccl is None
