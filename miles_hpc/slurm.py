"""Which node of which job this process is, as the scheduler says it, and the short questions a node asks Slurm.

Knows Slurm's and submitit's variables and the argv of `scontrol` and `squeue`; knows no run folder. A variable that is
missing or contradicts another raises: a guessed node index would start two heads.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_hpc.errors import Fault, PreflightError
from miles_hpc.process import run_short
from miles_hpc.units import parse_seconds

# A slurmctld under load answers late; its own client time-out (MessageTimeout) is 10 s by default.
_QUESTION_TIMEOUT_S = 30.0

# Source: "JOB STATE CODES" of the squeue manual. Every other state is final.
LIVE_STATES = frozenset(
    [
        "CONFIGURING",
        "COMPLETING",
        "PENDING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESIZING",
        "RESV_DEL_HOLD",
        "RUNNING",
        "SIGNALING",
        "SPECIAL_EXIT",
        "STAGE_OUT",
        "STOPPED",
        "SUSPENDED",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """Which node of which execution of which job this process serves.

    Attributes:
        job_id: Slurm's job id, or the process id of submitit's local controller.
        restart_count: how often Slurm has requeued this job.
        node: Slurm's name of this node; `local0`, `local1`, ... on the local cluster.
        node_index: this node's place in `nodes`; 0 is the head. Never derived from an address, since several nodes may
            share one.
        nodes: every node of the job, in Slurm's order.
    """

    cluster: Literal["slurm", "local"]
    job_id: str
    restart_count: int
    node: str
    node_index: int
    nodes: tuple[str, ...]

    @property
    def is_head(self) -> bool:
        """This node runs Ray's head and the driver."""
        return self.node_index == 0

    @property
    def head_node(self) -> str:
        """Name of the node with index 0."""
        return self.nodes[0]


def identify_node(cluster: Literal["slurm", "local"], environ: Mapping[str, str]) -> NodeIdentity:
    """Return the identity that the scheduler gave to this process.

    Raises:
        PreflightError: if a variable is missing, is no number, or two of them disagree.
    """
    return _from_submitit_local(environ) if cluster == "local" else _from_slurm(environ)


def _from_submitit_local(environ: Mapping[str, str]) -> NodeIdentity:
    count = _number(environ, "SUBMITIT_LOCAL_NTASKS")
    index = _number(environ, "SUBMITIT_LOCAL_GLOBALID")
    nodes = tuple(f"local{number}" for number in range(count))
    if index >= count:
        raise _contradiction(
            f"SUBMITIT_LOCAL_GLOBALID={index}", f"an index below SUBMITIT_LOCAL_NTASKS={count}"
        )
    return NodeIdentity(
        cluster="local",
        job_id=_text(environ, "SUBMITIT_LOCAL_JOB_ID"),
        restart_count=0,
        node=nodes[index],
        node_index=index,
        nodes=nodes,
    )


def _from_slurm(environ: Mapping[str, str]) -> NodeIdentity:
    # Inside a step SLURM_NODEID counts the step's nodes, so the step's list is the one to index.
    list_name = (
        "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    )
    nodes = expand_nodelist(_text(environ, list_name), environ)
    node = _text(environ, "SLURMD_NODENAME")
    index = _number(environ, "SLURM_NODEID")
    if index >= len(nodes) or nodes[index] != node:
        raise _contradiction(
            f"SLURM_NODEID={index} and SLURMD_NODENAME={node}",
            f"the name at that index of {list_name}: {' '.join(nodes)}",
        )
    count_name = "SLURM_JOB_NUM_NODES" if environ.get("SLURM_JOB_NUM_NODES") else "SLURM_NNODES"
    if _number(environ, count_name) != len(nodes):
        raise _contradiction(
            f"{count_name}={environ[count_name]}", f"{len(nodes)}, the length of {list_name}"
        )
    return NodeIdentity(
        cluster="slurm",
        job_id=_text(environ, "SLURM_JOB_ID"),
        restart_count=_number(environ, "SLURM_RESTART_COUNT", absent=0),
        node=node,
        node_index=index,
        nodes=nodes,
    )


def hostnames_argv(nodelist: str) -> tuple[str, ...]:
    """Return the command that prints the names in a compact node list, one a line."""
    return ("scontrol", "show", "hostnames", nodelist)


def expand_nodelist(nodelist: str, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the names in `nodelist` ("n[1-3],gpu07") in Slurm's order.

    Slurm itself is asked, because home-made parsers break on nested brackets and zero padding.

    Raises:
        PreflightError: if `scontrol` cannot be run or refuses the list.
    """
    done = run_short(hostnames_argv(nodelist), timeout_s=_QUESTION_TIMEOUT_S, environ=environ)
    names = tuple(done.stdout.split())
    if not done.ok or not names:
        raise PreflightError(
            str(
                Fault(
                    where="slurm: node list",
                    found=done.describe(),
                    expected=f"the node names in {nodelist!r}",
                    fix="Put Slurm's client commands on PATH on the compute nodes, also inside a container.",
                )
            )
        )
    return names


def node_address_argv(node: str) -> tuple[str, ...]:
    """Return the command that shows Slurm's record of `node`, NodeAddr included."""
    return ("scontrol", "--oneliner", "show", "node", node)


def parse_node_address(text: str) -> str | None:
    """Return NodeAddr from the output of `node_address_argv`, or None when there is none."""
    for word in text.split():
        if word.startswith("NodeAddr="):
            return word.partition("=")[2] or None
    return None


def ask_node_address(node: str) -> str | None:
    """Return the name or address by which Slurm itself reaches `node`, or None when Slurm does not say."""
    done = run_short(node_address_argv(node), timeout_s=_QUESTION_TIMEOUT_S)
    return parse_node_address(done.stdout) if done.ok else None


def job_state_argv(job_id: str) -> tuple[str, ...]:
    """Return the command that prints the state of one job; squeue, since accounting may be disabled."""
    return ("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job_id}")


def time_left_argv(job_id: str) -> tuple[str, ...]:
    """Return the command that prints how much of its time limit one job has left."""
    return ("squeue", "--noheader", "--format=%L", f"--jobs={job_id}")


def job_end_s(job_id: str, environ: Mapping[str, str]) -> float | None:
    """Return when (seconds since the epoch) Slurm will end this job for its time limit; None when it does not say.

    Source: "OUTPUT ENVIRONMENT VARIABLES" of the sbatch manual; older versions do not set the variable.
    """
    told = environ.get("SLURM_JOB_END_TIME", "")
    if told.isdecimal() and int(told) > 0:
        return float(told)
    asked_s = time.time()
    done = run_short(time_left_argv(job_id), timeout_s=_QUESTION_TIMEOUT_S)
    try:
        return asked_s + parse_seconds(done.stdout.strip()) if done.ok else None
    except ValueError:  # UNLIMITED, NOT_SET, INVALID
        return None


def requeue_argv(job_id: str) -> tuple[str, ...]:
    """Return the command that sends one job back to the queue."""
    return ("scontrol", "requeue", job_id)


def requeue_refusal(job_id: str) -> str | None:
    """Send a job, which may be this process's own, back to the queue; return why Slurm refused, or None."""
    done = run_short(requeue_argv(job_id), timeout_s=_QUESTION_TIMEOUT_S)
    return None if done.ok else done.describe()


def job_record_argv(job_id: str) -> tuple[str, ...]:
    """Return the command that shows Slurm's record of one job on one line."""
    return ("scontrol", "--oneliner", "show", "job", job_id)


def ask_job_record(job_id: str, *, timeout_s: float = _QUESTION_TIMEOUT_S) -> dict[str, str]:
    """Return the fields of Slurm's record of one job, such as JobState, Reason and Restarts; empty when it does not say."""
    done = run_short(job_record_argv(job_id), timeout_s=timeout_s)
    if not done.ok:
        return {}
    words = (word.partition("=") for word in done.stdout.split())
    return {name: value for name, mark, value in words if mark}


def is_job_live(job_id: str, cluster: Literal["slurm", "local"]) -> bool:
    """Say whether a job may still be running; when Slurm gives no answer, it may.

    On the local cluster a job is its controller process on this host.
    """
    if cluster == "local":
        try:
            command = Path("/proc", job_id, "cmdline").read_bytes()
        except OSError:
            return False
        return b"submitit" in command
    done = run_short(job_state_argv(job_id), timeout_s=_QUESTION_TIMEOUT_S)
    if not done.ok:
        return "Invalid job id" not in done.stderr
    return any(state in LIVE_STATES for state in done.stdout.split())


def _text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise PreflightError(
            str(
                Fault(
                    where=f"environment: {name}",
                    found="nothing",
                    expected="the value that the scheduler sets for each task",
                    fix="Start the node command with srun inside the job, or submit it with miles-hpc.",
                )
            )
        )
    return value


def _number(environ: Mapping[str, str], name: str, *, absent: int | None = None) -> int:
    if absent is not None and not environ.get(name):
        return absent
    text = _text(environ, name)
    if not text.isdecimal():
        raise _contradiction(f"{name}={text}", "a whole number")
    return int(text)


def _contradiction(found: str, expected: str) -> PreflightError:
    fix = "Start one task a node with srun over all nodes of the job, without changing Slurm's variables."
    return PreflightError(
        str(Fault(where="environment: node identity", found=found, expected=expected, fix=fix))
    )
