"""How long an allocation takes until its driver starts: ours, the floor below any launcher, and the usual recipe.

    python tests/bench/bring_up.py --nodes 1,2,4,8,24 --runs 3 [--recipe-nodes 4] [--output DIR]

All run as jobs of one Slurm of their own on this machine (tests/slurm/rig.py), interleaved, so that a slow spell of the
machine hits all alike. Clock zero is the first line of the batch script. Its end is

- ours: the driver's start, after preflight, scratch, the NCCL check and the ready barrier;
- floor: the moment Ray's GCS lists N living nodes, after a bare `ray start --head` and N - 1 concurrent joins with the same
  flags, environment and token, the join commands waiting for the head's port at 10 ms, the watcher already imported;
- recipe: the same `ray start` commands in the shape of the usual scripts: head in a background srun, `sleep 30`, workers that
  retry every 10 s, Ray asked every 10 s who is in.

It also prints what slurmctld was asked (sdiag) during each of our jobs, beside a job whose one srun step does nothing, and
whether the gates hold. With --output it writes bring_up.json, the tables as bring_up_table.md and the plot as bring_up.svg.
"""

import argparse
import compileall
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from svg_chart import line_chart

import miles_hpc
from miles_hpc.handoff import Handoff
from miles_hpc.node.memory import memory_left_bytes
from miles_hpc.node.network import choose_interface
from miles_hpc.node.ray_cluster import RaySettings, ray_start_argv
from miles_hpc.node.ray_memory import ray_memory
from miles_hpc.run.events import Kind
from miles_hpc.slurm import NodeIdentity
from tests.slurm import jobs
from tests.slurm.rig import SlurmRig

DEADLINE_S = 400.0
MAX_RATIO_AT_4 = 1.2
MAX_GROWTH_S_PER_NODE = 0.05
_ADDRESS = "HEAD_ADDRESS"
_OWN_QUESTIONS = ("REQUEST_STATS_INFO", "REQUEST_JOB_INFO_SINGLE", "REQUEST_FED_INFO")
_WATCH = """\
import json, sys, time
from pathlib import Path
from ray._raylet import GcsClient
address_file, num_nodes, done = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
interval_s = float(sys.argv[4])
while not address_file.exists():
    time.sleep(0.01)
client = None
while True:
    time.sleep(interval_s)
    try:
        client = client or GcsClient(address=address_file.read_text())
        alive = [1 for node in client.get_all_node_info(timeout=5).values() if node.state == 0]
        if len(alive) == num_nodes:
            break
    except Exception:
        client = None
done.with_suffix(".part").write_text(repr(time.time()))
done.with_suffix(".part").rename(done)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """What a bare Ray on one node is started with: its command (the head's address to be filled in) and its folder."""

    argv: tuple[str, ...]
    temp: Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", default="1,2,4,8,24")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--recipe-nodes", default="4", help="node counts of the recipe, run once")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.nodes.split(",")]
    recipe_sizes = [int(size) for size in arguments.recipe_nodes.split(",") if size]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    root = Path(tempfile.mkdtemp(prefix="bring-up-"))
    root.chmod(0o755)
    rig = SlurmRig(root / "rig", max([*sizes, *recipe_sizes]))
    results: dict[str, dict[int, list[float]]] = {"ours": {}, "floor": {}, "recipe": {}}
    requests: dict[int, dict[str, int]] = {}
    no_op_requests: dict[int, dict[str, int]] = {}
    # As an installation leaves the package; a checkout may never have been compiled.
    compileall.compile_dir(Path(miles_hpc.__file__).parent, quiet=1)
    try:
        rig.start()
        for size in sizes:
            no_op_requests[size] = run_no_op(rig, root, size)
        for turn in range(arguments.runs):
            for size in sizes:
                for way in ("floor", "ours") if turn % 2 else ("ours", "floor"):
                    folder = root / f"{way}-{size}-{turn}"
                    if way == "ours":
                        seconds, requests[size] = run_ours(rig, folder, size)
                    else:
                        seconds = run_bare(rig, folder, size, floor_script)
                    results[way].setdefault(size, []).append(seconds)
                    print(f"{way:7} {size:3} nodes {seconds:7.2f} s", flush=True)
        for size in recipe_sizes:
            seconds = run_bare(rig, root / f"recipe-{size}", size, recipe_script)
            results["recipe"].setdefault(size, []).append(seconds)
            print(f"recipe  {size:3} nodes {seconds:7.2f} s", flush=True)
    finally:
        rig.stop()
        shutil.rmtree(root, ignore_errors=True)
    text = report(results, requests, no_op_requests)
    print(f"\n{text}")
    if arguments.output:
        figures = {"seconds": results, "requests": requests, "no_op_requests": no_op_requests}
        write_files(arguments.output, json.dumps(figures, indent=1), text, draw(results))


def write_files(folder: Path, figures: str, table: str, plot: str) -> None:
    """Write what the page of measurements is made of."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bring_up.json").write_text(figures + "\n")
    (folder / "bring_up_table.md").write_text(table)
    (folder / "bring_up.svg").write_text(plot)


def run_ours(rig: SlurmRig, folder: Path, size: int) -> tuple[float, dict[str, int]]:
    """Return the seconds from the batch script's start to the driver's, and slurmctld's requests meanwhile."""
    run = jobs.write_run(folder, "pass", num_nodes=size, ready_deadline_s=DEADLINE_S)
    rig.run("sdiag", "--reset")
    job_id = jobs.submit(rig, run, started=run.root / "zero")
    end_s = time.monotonic() + DEADLINE_S
    while not run.attempt(1).verdict.exists():
        is_over = rig.record(job_id).get("JobState") not in ("PENDING", "RUNNING", "COMPLETING")
        if (is_over and not run.attempt(1).verdict.exists()) or time.monotonic() > end_s:
            raise SystemExit(f"job {job_id} wrote no verdict:\n{jobs.outputs(run)}")
        time.sleep(0.5)
    rig.wait_for_job(job_id, timeout_s=DEADLINE_S)
    asked = requests_of(rig)
    started = [e["time_s"] for e in jobs.events_of(run) if e["kind"] == Kind.DRIVER_STARTED]
    if len(started) != 1:
        raise SystemExit(f"job {job_id} started no driver:\n{jobs.outputs(run)}")
    return started[0] - float((run.root / "zero").read_text()), asked


def run_no_op(rig: SlurmRig, root: Path, size: int) -> dict[str, int]:
    """Return slurmctld's requests during a job whose one step does nothing on each node."""
    script = root / f"no-op-{size}.sbatch"
    script.write_text("#!/bin/bash\nsrun true\n")
    rig.run("sdiag", "--reset")
    options = (f"--nodes={size}", "--ntasks-per-node=1", "--mem=500", "--output=/dev/null")
    done = rig.run("sbatch", "--parsable", *options, str(script))
    if done.returncode:
        raise SystemExit(done.stderr)
    rig.wait_for_job(done.stdout.strip(), timeout_s=DEADLINE_S)
    return requests_of(rig)


def requests_of(rig: SlurmRig) -> dict[str, int]:
    """Return how often slurmctld was asked what, from sdiag, without this program's own questions."""
    text = rig.run("sdiag").stdout.partition("Remote Procedure Call statistics by user")[0]
    found = re.findall(r"^\s*(\w+)\s*\(\s*\d+\)\s+count:(\d+)", text, re.MULTILINE)
    return {name: int(count) for name, count in found if name not in _OWN_QUESTIONS}


def bare_nodes(folder: Path, handoff: Handoff, names: tuple[str, ...]) -> list[Bare]:
    """Return the command of a bare Ray for each node: the flags that the agents use."""
    nodes = []
    for index, name in enumerate(names):
        identity = NodeIdentity(
            cluster="slurm",
            job_id="0",
            restart_count=0,
            node=name,
            node_index=index,
            nodes=names,
        )
        temp = Path(tempfile.mkdtemp(prefix="bu-", dir="/tmp"))
        settings = RaySettings(
            environ={},
            interface=choose_interface(identity, None, None),
            temp=temp,
            memory=ray_memory(handoff, memory_left_bytes()[0]),
            client_server=False,
        )
        argv = ray_start_argv(handoff, identity, settings, _ADDRESS if index else None)
        nodes.append(Bare(argv=argv, temp=temp))
    return nodes


def run_bare(rig: SlurmRig, folder: Path, size: int, script_of) -> float:
    """Return the seconds from the batch script's start until N bare Ray nodes are listed."""
    run = jobs.write_run(folder, "pass", num_nodes=size)
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    nodes = bare_nodes(folder, jobs.handoff_of(run), rig.nodes[:size])
    host_flag = "--node-ip-address="
    host = next(arg for arg in nodes[0].argv if arg.startswith(host_flag)).removeprefix(host_flag)
    task = folder / "task.sh"
    task.write_text(task_script(folder, nodes, host))
    watch = folder / "watch.py"
    watch.write_text(_WATCH)
    script = folder / "job.sbatch"
    script.write_text(
        f"#!/bin/bash\ndate +%s.%N > {folder}/zero\n"
        f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token} RAY_USAGE_STATS_ENABLED=0 "
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0\n" + script_of(folder, size)
    )
    done = rig.run(
        "sbatch",
        "--parsable",
        f"--nodes={size}",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--mem=500",
        f"--output={folder}/out",
        str(script),
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    job_id = done.stdout.strip()
    end_s = time.monotonic() + DEADLINE_S
    try:
        while not (folder / "done").exists():
            if time.monotonic() > end_s:
                text = "\n".join(p.read_text()[-1500:] for p in folder.glob("out*"))
                raise SystemExit(f"{folder.name}: no {size} nodes after {DEADLINE_S:g} s\n{text}")
            time.sleep(0.05)
    finally:
        rig.run("scancel", job_id)
        rig.wait_for_job(job_id)
        for node in nodes:
            shutil.rmtree(node.temp, ignore_errors=True)
    zero, done_s = (float((folder / name).read_text()) for name in ("zero", "done"))
    return done_s - zero


def task_script(folder: Path, nodes: list[Bare], host: str) -> str:
    """Return what runs on each node of a bare cluster; the head publishes its address, the others wait for it."""
    head = nodes[0]
    joins = "".join(
        f"  {index}) exec {shlex.join(node.argv).replace(_ADDRESS, '$(cat ' + str(folder) + '/address)')} ;;\n"
        for index, node in enumerate(nodes)
        if index
    )
    # A sleep that starts no process, since 100 of them a second on every waiting node would slow the floor.
    return (
        "exec {never}<> <(:)\nnap() { read -r -t 0.01 -u $never; }\n"
        "if [ $SLURM_NODEID = 0 ]; then\n"
        f"  {shlex.join(head.argv)} &\n"
        f"  until [ -s $(echo {head.temp}/session_2*/gcs_server_port_*) ] 2>/dev/null; do nap; done\n"
        f"  printf '%s:%s' {host} $(cat {head.temp}/session_2*/gcs_server_port_*) > {folder}/address.part\n"
        f"  mv {folder}/address.part {folder}/address\n  wait\n"
        "else\n"
        f"  until [ -e {folder}/address ]; do nap; done\n"
        f"  case $SLURM_NODEID in\n{joins}  esac\nfi\n"
    )


def watch_argv(folder: Path, size: int, interval_s: float) -> str:
    """Return the command that writes the time at which `size` nodes are listed."""
    files = (f"{folder}/address", str(size), f"{folder}/done")
    return shlex.join([sys.executable, f"{folder}/watch.py", *files, str(interval_s)])


def floor_script(folder: Path, size: int) -> str:
    """Return the batch script's body that joins all nodes as early as they can."""
    watch = watch_argv(folder, size, 0.01)
    return f"{watch} &\nexec srun --output={folder}/out.%t bash {folder}/task.sh\n"


def recipe_script(folder: Path, size: int) -> str:
    """Return the batch script's body in the shape of the usual recipes."""
    workers = (
        f"srun --overlap --nodes={size - 1} --ntasks={size - 1} --relative=1 --output={folder}/out.w%t "
        f"bash -c 'export SLURM_NODEID=$((SLURM_NODEID + 1)); "
        f"until bash {folder}/task.sh; do sleep 10; done' &\n"
    )
    return (
        f"srun --overlap --nodes=1 --ntasks=1 --relative=0 --output={folder}/out.h "
        f"bash {folder}/task.sh &\nsleep 30\n"
        + (workers if size > 1 else "")
        + f"{watch_argv(folder, size, 10)}\nwait\n"
    )


def medians(seconds: dict[int, list[float]]) -> dict[int, float]:
    """Return the median by number of nodes."""
    return {size: statistics.median(values) for size, values in sorted(seconds.items())}


def report(
    results: dict[str, dict[int, list[float]]],
    requests: dict[int, dict[str, int]],
    no_op_requests: dict[int, dict[str, int]],
) -> str:
    """Return medians, ratios, gates and what slurmctld was asked, as Markdown."""
    ours, floor, recipe = (medians(results[way]) for way in ("ours", "floor", "recipe"))
    num_runs = len(next(iter(results["ours"].values())))
    lines = [
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the end, {num_runs} runs; medians in seconds.",
        "",
        "| nodes | floor | ours | ours / floor | ours - floor | recipe |",
        "|---|---|---|---|---|---|",
    ]
    for size, seconds in ours.items():
        low = floor[size]
        shown = f"{recipe[size]:.1f}" if size in recipe else ""
        lines.append(
            f"| {size} | {low:.2f} | {seconds:.2f} | {seconds / low:.2f} | {seconds - low:+.2f} | {shown} |"
        )
    lines += ["", *gates(ours, floor), ""]
    lines.append(
        "| request to slurmctld: ours (step of `true`) |" + _row(f"{n} nodes" for n in ours)
    )
    lines.append("|---" * (len(ours) + 1) + "|")
    asked = [*requests.values(), *no_op_requests.values()]
    for name in sorted({name for counts in asked for name in counts}):
        cells = (f"{requests[n].get(name, 0)} ({no_op_requests[n].get(name, 0)})" for n in ours)
        lines.append(f"| {name} |{_row(cells)}")
    return "\n".join(lines) + "\n"


def gates(ours: dict[int, float], floor: dict[int, float]) -> list[str]:
    """Return a line for each gate that these sizes can decide."""
    lines = []
    if 4 in ours:
        ratio = ours[4] / floor[4]
        word = "holds" if ratio <= MAX_RATIO_AT_4 else "FAILS"
        lines.append(f"- ours / floor at 4 nodes: {ratio:.2f} of {MAX_RATIO_AT_4:g}: {word}")
    first, last = min(ours), max(ours)
    if first < last:
        more = {size: ours[size] - floor[size] for size in (first, last)}
        growth = (more[last] - more[first]) / (last - first)
        word = "holds" if growth <= MAX_GROWTH_S_PER_NODE else "FAILS"
        lines.append(
            f"- growth of ours - floor from {first} to {last} nodes: {growth * 1000:+.0f} ms a node "
            f"of {MAX_GROWTH_S_PER_NODE * 1000:g}: {word}"
        )
    return lines


def draw(results: dict[str, dict[int, list[float]]]) -> str:
    """Return the plot of ours and the floor; the recipe's sleep would flatten both, so the table alone has it."""
    lines = {way: list(medians(results[way]).items()) for way in ("ours", "floor")}
    return line_chart(lines, x_label="nodes", y_label="allocation start to driver start, seconds")


def _row(cells: Iterable[str]) -> str:
    return "".join(f" {cell} |" for cell in cells)


if __name__ == "__main__":
    main()
