"""What a person gives a job reaches its driver byte for byte, and nothing else does: by submitit and by plain sbatch.

The command line and the node agent are the real ones; only the driver is a stub that looks around.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from miles_hpc.paths import RunDir
from tests.slurm.jobs import (
    REPOSITORY,
    assert_nothing_left,
    attempt_of,
    outputs,
    read_json,
    verdict_of,
    wait_for,
)

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]

SPEC = REPOSITORY / "jobs" / "demo_tiny.toml"
CANARY = "canary-9b2e'\"$(id),(%j)\nsecond-canary-line"
# Every character that some shell, Slurm or Python would read as its own.
HOSTILE = {
    "QUOTES": "a'b\"c`d",
    "LINES": "first\nsecond\n\tthird",
    "COMMANDS": "$(touch {marker}) `touch {marker}` ; touch {marker} ${HOME} $HOME",
    "COMMAS": "a,b,,c=d,ALL",
    "SLURM": "%j %x %% #SBATCH --time=1",
    "BRACES": "{run_dir} (a) [b] \\ \\n",
    "WORDS": "Grüße 日本 \U0001f600",
    "EMPTY": "",
    "BLANKS": "  both sides  ",
}
FOLDER = 'it\'s (a) "run", $(touch MARKER) #1 Grüße;&'
# What a submitting shell may hold and no job may inherit.
LEAKS = {
    "http_proxy": "http://203.0.113.9:3128",
    "HTTPS_PROXY": "http://203.0.113.9:3128",
    "no_proxy": "leaked",
    "SBATCH_MEM_PER_CPU": "100",
    "SLURM_LEAKED": "leaked",
    "SLURM_MEM_PER_CPU": "100",
    "SLURM_CPU_BIND": "leaked",
    "PYTHONHOME": "/nonexistent",
    "PYTHONPATH": "/leaked",
    "PYTHONSTARTUP": "/leaked",
    "PYTHONWARNINGS": "error",
    "CONDA_PREFIX": "/leaked",
    "CONDA_DEFAULT_ENV": "leaked",
    "VIRTUAL_ENV": "/leaked",
}

DRIVER = """
    import hashlib, json, os, pathlib, sys, time
    import ray
    ray.init(logging_level="ERROR")

    @ray.remote(num_cpus=0)
    def look():
        return dict(os.environ)

    @ray.remote(num_cpus=0)
    class UsesNccl:
        def look(self):
            from miles_hpc.probe.nccl_hook import prove_nccl
            return {"pid": os.getpid(), "preload": os.environ["LD_PRELOAD"], "code": prove_nccl().version_code}

    from miles_hpc.preload import merge_preload
    preload = merge_preload(
        memory_saver=None, nccl=os.environ["MILES_HPC_NCCL"], site=os.environ.get("LD_PRELOAD", "")
    )
    nccl = UsesNccl.options(runtime_env={"env_vars": {"LD_PRELOAD": preload}}).remote()

    attempt = pathlib.Path(sys.argv[1])
    secret = os.environ.get("WANDB_API_KEY", "")
    print("the driver knows", secret, flush=True) if sys.argv[2] == "fail" else None
    seen = {
        "secret_sha256": hashlib.sha256(secret.encode()).hexdigest(),
        "driver": {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"},
        "actor": ray.get(look.options(resources={"miles_hpc_node_1": 0.01}).remote()),
        "pid": os.getpid(),
        "nccl": ray.get(nccl.look.remote()),
        "nccl_path": os.environ["MILES_HPC_NCCL"],
    }
    (attempt / "seen.json").write_text(json.dumps(seen))
    os.rename(attempt / "seen.json", attempt / "ready.json")
    end = time.monotonic() + 120
    while not (attempt / "go").exists() and time.monotonic() < end:
        time.sleep(0.05)
    sys.exit(3 if sys.argv[2] == "fail" else 0)
"""

# The command line with one step more: the stub takes the driver's place in handoff.json.
_WITH_DRIVER = """
import json, sys
from miles_hpc import cli
from miles_hpc.launch import bundle

driver = json.loads(sys.argv[1])
write = bundle.write_run_folder

def write_with_driver(*arguments, **named):
    run, handoff = write(*arguments, **named)
    told = json.loads(run.handoff.read_text())
    run.handoff.write_text(json.dumps({**told, "driver_argv": driver}))
    return run, handoff

bundle.write_run_folder = write_with_driver
sys.argv[1:2] = []
cli.main()
"""


@dataclass
class Looked:
    """A finished run, what its driver saw, and what was found while it ran."""

    run: RunDir
    job_id: str
    seen: dict
    record: str
    commands: dict[int, str]
    holders: dict[int, str]
    temporary: tuple[Path, ...]
    with_nccl: dict[int, str]
    with_site: dict[int, str]
    site: Path
    state: Path


def toml_of(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def write_spec(folder: Path, *, comment: str = "", secrets: str) -> Path:
    env = "\n".join(f"{name} = {toml_of(value)}" for name, value in hostile(folder).items())
    path = folder / "job.toml"
    path.write_text(
        f"extends = {toml_of(str(SPEC))}\n[job]\ncomment = {toml_of(comment)}\n"
        f'[cluster]\nmemory_per_node = "2GiB"\n[secrets]\n{secrets}\n[env]\n{env}\n'
    )
    return path


def hostile(folder: Path) -> dict[str, str]:
    return {
        name: value.replace("{marker}", str(folder / "evaluated"))
        for name, value in HOSTILE.items()
    }


def start(slurm, folder: Path, way: str, spec: Path, end: str, **environ: str) -> tuple:
    """Send the job on its way as a person would, and return the run and the job id."""
    script = folder / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    path = os.pathsep.join((os.environ["PATH"], "/usr/sbin"))
    base = {**slurm.environ, "PATH": path, "XDG_STATE_HOME": str(folder / "state")}
    shell = {**base, **LEAKS, **environ}
    driver = json.dumps([sys.executable, str(script), "{attempt_dir}", end])
    root = folder / FOLDER
    told = [f"--set=job.run_root={toml_of(str(root))}"] if way == "submit" else ["-o", str(root)]
    # This Python must itself start; the job's shell is the leaking one.
    own = {name: value for name, value in shell.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-c", _WITH_DRIVER, driver, way, str(spec), "--json", *told],
        env={**own, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "default"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    run = RunDir(Path(answer["run_dir"]))
    if way == "submit":
        return run, answer["job_id"]
    sent = slurm.run("sbatch", "--parsable", str(run.sbatch_script), environ=shell)
    assert sent.returncode == 0, sent.stderr
    return run, sent.stdout.strip()


def write_site_library(folder: Path) -> Path:
    """Return a library as a site preloads one; its code does not matter."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    libm = next(line.split()[-1] for line in maps if "/libm.so" in line or "/libm-" in line)
    return Path(shutil.copyfile(libm, folder / "libsite.so"))


def processes_with(text: bytes, name: str) -> dict[int, str]:
    """Return the commands of the processes whose /proc file `name` holds `text`."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and text in (entry / name).read_bytes():
                command = (entry / "cmdline").read_bytes()
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found


def files_with(folder: Path, text: bytes) -> list[Path]:
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and text in path.read_bytes()
    ]


@pytest.fixture(scope="module", params=["submit", "render"])
def looked(slurm, request, tmp_path_factory) -> Looked:
    """Return a finished run of two nodes, sent on its way by submitit or by plain sbatch."""
    folder = tmp_path_factory.mktemp(request.param)
    spec = write_spec(
        folder, comment="it's $(id) %j, (x) Grüße", secrets='names = ["WANDB_API_KEY"]'
    )
    site = write_site_library(folder)
    run, job_id = start(
        slurm, folder, request.param, spec, "end", WANDB_API_KEY=CANARY, LD_PRELOAD=str(site)
    )
    ready = run.attempt(1).root / "ready.json"
    wait_for(ready.exists, "a driver that has looked around", run, timeout_s=150)
    canary = CANARY.splitlines()[0].encode()
    record = slurm.run("scontrol", "-dd", "show", "job", job_id).stdout
    commands = processes_with(canary, "cmdline")
    holders = processes_with(canary, "environ")
    temporary = tuple(
        path for path in files_with(Path(f"/tmp/mhpc-{os.getuid()}"), canary) if path.is_file()
    )
    seen = read_json(ready)
    with_nccl = processes_with(seen["nccl_path"].encode(), "maps")
    with_site = processes_with(str(site).encode(), "maps")
    (run.attempt(1).root / "go").touch()
    assert slurm.wait_for_job(job_id)["JobState"] == "COMPLETED", outputs(run)
    return Looked(
        run=run,
        job_id=job_id,
        seen=seen,
        record=record,
        commands=commands,
        holders=holders,
        temporary=temporary,
        with_nccl=with_nccl,
        with_site=with_site,
        site=site,
        state=folder / "state",
    )


def test_the_driver_has_the_secret_byte_for_byte(looked):
    assert looked.seen["secret_sha256"] == hashlib.sha256(CANARY.encode()).hexdigest()


def test_the_secret_is_in_no_file_no_record_and_on_no_command_line(slurm, looked):
    for line in CANARY.splitlines():
        assert files_with(looked.run.root, line.encode()) == []
        assert files_with(slurm.root / "log", line.encode()) == []
        assert line not in looked.record
    assert looked.commands == {}
    assert looked.temporary == ()


def test_nothing_of_ours_but_the_driver_has_the_secret_in_its_environment(looked):
    own = looked.seen["pid"]
    assert own in looked.holders
    # What plain sbatch is started from is what the user exported to Slurm; it ends before the node agent.
    others = {
        pid: command
        for pid, command in looked.holders.items()
        if pid != own and not command.startswith(("/bin/bash", "srun", "slurmstepd"))
    }
    assert others == {}
    assert "WANDB_API_KEY" not in looked.seen["actor"]


def test_the_stored_secret_is_gone_when_the_job_has_ended(looked):
    assert [path for path in looked.state.rglob("*") if path.is_file()] == []
    assert_nothing_left(looked.run)


def test_values_of_the_spec_reach_driver_and_workers_byte_for_byte(looked):
    wanted = hostile(looked.state.parent)
    for who in ("driver", "actor"):
        assert {name: looked.seen[who].get(name) for name in wanted} == wanted, who


def test_nothing_of_the_spec_or_the_path_was_evaluated(looked):
    assert not (looked.state.parent / "evaluated").exists()
    assert list(Path.cwd().glob("MARKER")) == []
    assert list(looked.run.root.rglob("MARKER")) == []
    assert FOLDER in str(looked.run.root)
    assert looked.seen["driver"]["MILES_HPC_RUN_DIR"] == str(looked.run.root)


def test_the_comment_reaches_slurm_as_it_was_written(looked):
    (line,) = [line for line in looked.record.splitlines() if line.strip().startswith("Comment=")]
    assert line.strip() == "Comment=it's $(id) %j, (x) Grüße"


def test_nothing_of_the_submitting_shell_leaks_into_the_job(looked):
    for who in ("driver", "actor"):
        environ = looked.seen[who]
        leaked = {name: environ.get(name) for name in LEAKS if environ.get(name) == LEAKS[name]}
        assert leaked == {}, who
        assert not [name for name in environ if name.startswith(("SBATCH_", "SRUN_", "CONDA_"))]
        assert environ["SLURM_JOB_ID"] == looked.job_id


def test_the_sites_preload_stays_everywhere_and_nccl_is_where_it_is_used_alone(looked):
    nccl = looked.seen["nccl"]
    assert nccl["preload"] == f"{looked.seen['nccl_path']}:{looked.site}"
    assert nccl["code"] == 23007
    # Not the driver, the plain worker, raylet, GCS, the node agents, srun or a shell.
    assert set(looked.with_nccl) == {nccl["pid"]}
    assert {nccl["pid"], looked.seen["pid"]} <= set(looked.with_site)
    assert any("raylet" in command for command in looked.with_site.values())


def test_a_driver_that_prints_its_secret_does_not_put_it_into_our_verdict(slurm, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("# mine\nWANDB_API_KEY=canary-in-a-file-61\n")
    kept.chmod(0o600)
    spec = write_spec(tmp_path, secrets=f'names = ["WANDB_API_KEY"]\nfile = {toml_of(str(kept))}')
    run, job_id = start(slurm, tmp_path, "submit", spec, "fail")
    ready = run.attempt(1).root / "ready.json"
    wait_for(ready.exists, "a driver that has looked around", run, timeout_s=150)
    (run.attempt(1).root / "go").touch()
    slurm.wait_for_job(job_id)
    assert verdict_of(run).exit_code == 12, outputs(run)
    assert "the driver knows [secret]" in verdict_of(run).reason
    with_it = files_with(run.root, b"canary-in-a-file-61")
    # The driver's own log is the driver's own word.
    assert with_it == [attempt_of(run).driver_log]
    assert kept.exists()
