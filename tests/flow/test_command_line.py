"""The command line against a fake Slurm on PATH: what it prints, its exit codes, and what it leaves behind."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from miles_hpc import __version__
from miles_hpc.errors import (
    DriverError,
    MilesHpcError,
    NodeError,
    PlanError,
    PreflightError,
    QueueError,
    ResumeError,
    SpecError,
    SubmitError,
)
from miles_hpc.handoff import node_argv, read_handoff
from miles_hpc.launch.catalogue import read_recipe
from miles_hpc.launch.progress import exit_code_of
from miles_hpc.run.report import Status
from miles_hpc.spec.load import load_spec
from tests.fakes.recipes import CATALOGUE
from tests.fakes.submission import ROOT, SPEC, command, miles_hpc, only_run

REFUSED = [path for path in CATALOGUE if read_recipe(path).violates]
SOUND = [path for path in CATALOGUE if path not in REFUSED]


def run_root(folder):
    return ("--set", f"job.run_root={json.dumps(str(folder))}")


def assert_one_error(done, exit_code):
    """Fail unless the command ended with this code, one message and nothing on stdout."""
    assert done.returncode == exit_code, done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_submit_sends_the_node_command_and_prints_the_folder(fake_slurm, tmp_path):
    done = miles_hpc("submit", str(SPEC), *run_root(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    assert json.loads(done.stdout) == {
        "run_dir": str(run.root),
        "job_id": "4100",
        "cluster": "slurm",
    }
    assert json.loads(run.job.read_text())["job_id"] == "4100"
    (call,) = fake_slurm.calls("sbatch")
    lines = call["script"].splitlines()
    rendered = run.sbatch_script.read_text().splitlines()
    ours = {line for line in rendered if line.startswith("#SBATCH")}
    theirs = {line for line in lines if line.startswith("#SBATCH")}
    assert ours <= theirs
    assert theirs - ours == {"#SBATCH --signal=CONT@0", "#SBATCH --wckey=submitit"}


def test_both_ways_run_the_same_step(fake_slurm, tmp_path):
    miles_hpc("submit", str(SPEC), *run_root(tmp_path))
    run = only_run(tmp_path)
    (call,) = fake_slurm.calls("sbatch")
    theirs = shlex.split(
        next(line for line in call["script"].splitlines() if line.startswith("srun"))
    )
    ours = shlex.split(run.sbatch_script.read_text().splitlines()[-1])
    command_of_node = node_argv(read_handoff(run.handoff))
    options = [word for word in ours[: -len(command_of_node)] if not word.startswith("--output")]
    assert [word for word in options if word not in theirs] == []
    assert tuple(ours[-len(command_of_node) :]) == command_of_node


def test_the_payload_is_exec_of_the_node_command_and_nothing_else(fake_slurm, tmp_path):
    import pickle

    miles_hpc("submit", str(SPEC), *run_root(tmp_path))
    run = only_run(tmp_path)
    (path,) = run.submission.glob("*_submitted.pkl")
    submission = pickle.loads(path.read_bytes())
    assert submission.function is os.execv
    assert submission.args == ("/usr/bin/env", list(node_argv(read_handoff(run.handoff))))
    assert submission.kwargs == {}


def test_variables_of_an_enclosing_allocation_do_not_reach_sbatch(
    fake_slurm, tmp_path, monkeypatch
):
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "100")
    monkeypatch.setenv("SLURM_CONF", "/etc/kept.conf")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    monkeypatch.setenv("SBATCH_ACCOUNT", "site-default")
    miles_hpc("submit", str(SPEC), *run_root(tmp_path))
    (call,) = fake_slurm.calls("sbatch")
    assert call["slurm_names"] == ["SBATCH_ACCOUNT", "SLURM_CONF"]


def test_an_option_of_the_spec_wins_over_the_shells_default(fake_slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("SBATCH_ACCOUNT", "site-default")
    miles_hpc("submit", str(SPEC), *run_root(tmp_path), "--set", "cluster.account=mine")
    (call,) = fake_slurm.calls("sbatch")
    assert call["slurm_names"] == []
    assert "#SBATCH --account=mine" in call["script"]


def test_a_refusal_of_sbatch_is_told_in_its_words_and_leaves_nothing(fake_slurm, tmp_path):
    words = "sbatch: error: invalid partition specified: nope"
    fake_slurm.answer("sbatch", stderr=words + "\n", exit_code=1)
    done = miles_hpc("submit", str(SPEC), *run_root(tmp_path))
    assert_one_error(done, 4)
    assert words in done.stderr
    assert "exit code 1" in done.stderr
    assert "sbatch /" in done.stderr
    assert done.stderr.count(words) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_answer_without_a_job_id_keeps_the_folder_for_the_job_that_may_exist(
    fake_slurm, tmp_path
):
    fake_slurm.answer("sbatch", stdout="thank you\n")
    done = miles_hpc("submit", str(SPEC), *run_root(tmp_path))
    assert_one_error(done, 4)
    assert str(only_run(tmp_path).root) in done.stderr


def test_without_slurm_both_other_ways_are_named(no_slurm, tmp_path):
    done = miles_hpc("submit", str(SPEC), *run_root(tmp_path))
    assert_one_error(done, 4)
    assert "--cluster local" in done.stderr
    assert "render" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_render_needs_neither_slurm_nor_submitit(no_slurm, tmp_path):
    (tmp_path / "submitit.py").write_text("raise ImportError('no submitit here')")
    output = tmp_path / "out"
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    done = subprocess.run(
        command("render", str(SPEC), "-o", str(output)),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{output}\n"), done.stderr
    assert (output / "job.sbatch").is_file()


def test_render_and_submit_write_the_same_files(fake_slurm, tmp_path):
    miles_hpc("submit", str(SPEC), *run_root(tmp_path / "a"))
    miles_hpc("render", str(SPEC), *run_root(tmp_path / "a"), "-o", str(tmp_path / "b"))
    (submitted,) = (tmp_path / "a").iterdir()
    contents = []
    for root in (submitted, tmp_path / "b"):
        contents.append(
            {
                str(path.relative_to(root)): path.read_bytes().replace(str(root).encode(), b"ROOT")
                for path in root.rglob("*")
                if path.is_file() and path.relative_to(root).parts[0] != "submission"
            }
        )
    del contents[0]["job.json"]
    assert contents[0] == contents[1]


def test_status_of_a_rendered_folder_is_unknown_and_says_why(no_slurm, tmp_path):
    miles_hpc("render", str(SPEC), "-o", str(tmp_path / "out"))
    told = json.loads(miles_hpc("status", str(tmp_path / "out"), "--json").stdout)
    assert (told["state"], told["job_id"], told["attempt"]) == ("UNKNOWN", None, 0)
    assert told["reason"]


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (("check", "missing.toml"), 2),
        (("plan", "missing.toml", "--json"), 2),
        (("submit", "missing.toml"), 2),
        (("check", str(SPEC), "--set", "nothing"), 2),
        (("check", str(SPEC), "--site", "nowhere"), 2),
        (("explain", "MH999"), 2),
        (("check", str(SPEC), "--set", "parallel.tp=3"), 3),
        (("render", str(SPEC), "-o", "/proc/nothing"), 4),
        (("render", str(SPEC), "-o", "a%b"), 4),
        (("status", "nowhere"), 5),
        (("logs", "nowhere"), 5),
        (("cancel", "no\x1b[2Jwhere"), 5),
    ],
)
def test_bad_input_is_one_message_with_its_exit_code(fake_slurm, tmp_path, arguments, exit_code):
    done = miles_hpc(*arguments, cwd=tmp_path)
    assert_one_error(done, exit_code)
    assert "\x1b" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [("--nonsense",), ("submit",), ("dance",), ("submit", str(SPEC), "--cluster", "cloud")],
)
def test_bad_usage_ends_with_2(arguments):
    done = miles_hpc(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_an_impossible_plan_is_still_shown_and_ends_with_3(tmp_path):
    done = miles_hpc("plan", str(SPEC), "--json", "--set", "engine.native.threads_per_rank=4")
    assert done.returncode == 3
    assert json.loads(done.stdout)["findings"]
    assert done.stderr.startswith("error: ")


def test_plan_prints_the_object_that_others_rely_on():
    done = miles_hpc("plan", str(SPEC), "--json")
    plan = json.loads(done.stdout)
    assert {name: plan["layout"][name] for name in ("world_size", "tp", "pp", "num_nodes")} == {
        "world_size": 2, "tp": 2, "pp": 1, "num_nodes": 2,
    }  # fmt: skip
    assert set(plan["rollout"]) == {"num_engines", "gpus_per_engine", "nodes_per_engine"}
    assert {"name", "value", "why", "source"} <= set(plan["environment"][0])
    assert plan["driver_argv"][-1] == "{run_dir}"


@pytest.mark.parametrize("recipe", SOUND, ids=lambda path: path.stem)
def test_every_sound_recipe_checks_plans_and_renders(recipe, tmp_path, monkeypatch):
    secrets = load_spec(recipe).spec.secrets
    for name in () if secrets is None else secrets.names:
        monkeypatch.setenv(name, "a-value-for-tests")
    assert miles_hpc("check", str(recipe)).returncode == 0
    text = miles_hpc("plan", str(recipe))
    assert text.returncode == 0
    for heading in ("layout", "rollout", "memory", "environment", "driver"):
        assert f"\n{heading}\n" in text.stdout
    assert miles_hpc("render", str(recipe), "-o", str(tmp_path / "out")).returncode == 0


@pytest.mark.parametrize("recipe", REFUSED, ids=lambda path: path.stem)
def test_every_refused_recipe_is_refused_by_name_and_renders_nothing(recipe, tmp_path):
    for words in (("check",), ("plan",), ("render", "-o", str(tmp_path / "out"))):
        done = miles_hpc(words[0], str(recipe), *words[1:])
        assert done.returncode == PlanError.exit_code
        assert all(f"{rule} " in done.stderr for rule in read_recipe(recipe).violates)
        assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MilesHpcError, 1),
        (SpecError, 2),
        (PlanError, 3),
        (SubmitError, 4),
        (QueueError, 5),
        (PreflightError, 10),
        (NodeError, 11),
        (DriverError, 12),
        (ResumeError, 13),
    ],
)
def test_every_error_of_the_tree_becomes_its_exit_code(monkeypatch, capsys, error, code):
    from miles_hpc import cli
    from miles_hpc.launch import describe

    def fail(_):
        raise error("where: found this; expected that. Do so.")

    monkeypatch.setattr(describe, "explain_rule", fail)
    monkeypatch.setattr(sys, "argv", ["miles-hpc", "explain", "MH101"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert capsys.readouterr().err == "error: where: found this; expected that. Do so.\n"


@pytest.mark.parametrize(
    ("state", "exit_code", "expected"),
    [
        ("COMPLETED", 0, 0),
        ("COMPLETED", None, 0),
        ("FAILED", 12, 12),
        ("FAILED", None, 1),
        ("FAILED", 0, 1),
        ("CANCELLED", 1, 1),
        ("CANCELLED", None, 1),
    ],
)
def test_wait_never_turns_a_failure_into_success(state, exit_code, expected):
    last = Status(
        run_dir="/r",
        job_id="1",
        state=state,
        attempt=1,
        exit_code=exit_code,
        driver_exit_code=None,
        reason="",
    )
    assert exit_code_of(last) == expected


def test_a_broken_pipe_is_quiet():
    process = subprocess.Popen(
        command("plan", str(SPEC), "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert errors == b""


def test_no_secret_of_the_callers_shell_is_written(fake_slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-4711")
    miles_hpc("submit", str(SPEC), *run_root(tmp_path))
    written = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert [path for path in written if b"canary-4711" in path.read_bytes()] == []
    assert all("canary-4711" not in call["script"] for call in fake_slurm.calls("sbatch"))


def test_the_module_of_the_command_line_runs_it():
    done = subprocess.run(
        [sys.executable, "-m", "miles_hpc.cli", "--version"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, __version__), done.stderr
