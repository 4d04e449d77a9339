"""handoff.json: everything a compute node needs to know, written on the login node and read by the node agent.

Standard library only, since both sides import it. Knows no rule of the spec and no Slurm command: the login node has
already decided everything that can be decided there.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_hpc.errors import ResumeError

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One environment variable of the job's processes.

    Attributes:
        scope: "ray" reaches Ray's daemons and so every worker; "driver" the driver alone. The agent adds nothing else.
    """

    name: str
    value: str
    scope: Literal["ray", "driver"] = "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeniedNccl:
    """NCCL versions that no job may use, by the codes of the first and the last, and why."""

    first_code: int
    last_code: int
    why: str

    def covers(self, code: int) -> bool:
        """Say whether `code` is one of them."""
        return self.first_code <= code <= self.last_code


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclPin:
    """The NCCL library to inject.

    Attributes:
        path: the library on the node; None means: the nvidia-nccl-cu13 package beside `python`.
        version_code: what ncclGetVersion must report (23007 for 2.30.7).
        preload: put it in LD_PRELOAD of Ray's worker processes.
        denied: versions that are refused though they were asked for.
        on_mismatch: what a process of the job that uses another NCCL does to the job: end it, or warn.
    """

    path: str | None
    version_code: int
    preload: bool
    on_mismatch: Literal["fail", "warn"] = "fail"
    denied: tuple[DeniedNccl, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretSource:
    """Where the driver's secrets are; no value ever stands in this file.

    Attributes:
        names: the variables that the driver gets.
        path: a file of mode 0600 that the head node's agent reads when it starts the driver.
        is_stored: the file is our own, made at submission from the submitter's environment, and is removed at the end.
    """

    names: tuple[str, ...]
    path: str
    is_stored: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchRequest:
    """Which node-local folder the offloaded tensors need.

    Attributes:
        root: folder below which the job's own is made; None means the agent's list of candidates.
        min_free_bytes: free space that must be there.
        allow_memory: accept tmpfs, ramfs, overlay on them, or a network file system.
    """

    root: str | None
    min_free_bytes: int
    allow_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAlarm:
    """When the host memory of a node is too much, and what the agent then does beside saying so.

    Attributes:
        host_bytes: host memory of one node above which the alarm is raised.
        action: "drop_page_cache" drops that of `page_cache_roots`; "stop" ends the attempt.
    """

    host_bytes: int
    action: Literal["warn", "drop_page_cache", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTrigger:
    """How this engine's driver is asked to save and stop.

    Attributes:
        path: the file whose appearance asks it, with placeholders as in `driver_argv`.
        done: "exit" when the driver saves and ends by itself with `run.save_request.DRIVER_EXIT_CODE`; "removed" when it
            removes the file once it has saved and goes on, so that the agent ends it.
    """

    path: str
    done: Literal["exit", "removed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """What one job's node agents are told; equal on every node.

    Attributes:
        run_dir: absolute path of the run folder.
        code_dir: absolute path of the frozen package, put on PYTHONPATH.
        python: interpreter of Ray, the probes and the driver.
        cluster: "slurm" or "local" (submitit's local executor on one machine).
        num_nodes: nodes of the job; each runs one agent.
        ranks_per_node: trainer ranks on each node.
        gpus_per_node: GPUs announced to Ray on each node; 0 on CPU.
        cpus_per_node: CPUs announced to Ray; None means the CPUs this process may use (a local node: its share).
        memory_bytes: memory asked for on each node; None means what the cgroup or machine has.
        object_store_bytes: Ray's object store on each node.
        environment: variables with their scope.
        nccl: the pin; None when the job must not preload NCCL.
        interface: network interface or NCCL pattern; None means: the one that holds the node's own address.
        driver_argv: the driver's command. Placeholders `{run_dir}`, `{attempt_dir}`, `{scratch_dir}`, `{head_address}`,
            `{num_nodes}` are filled on the head node; no other braces have a meaning.
        page_cache_roots: files or folders whose page cache is dropped on every node once the driver has loaded.
        memory_alarm: None when neither the plan nor the spec knows how much a node has.
        resume: "auto" or "never".
        max_attempts: attempts allowed in this run folder.
        ready_deadline_s / stop_grace_s: the agent's deadlines.
        secrets: the driver's secrets by name; None when it has none.
        dashboard: start Ray's dashboard on the head node's loopback interface.
        save_trigger: None for a driver that cannot be asked to save.
        time_limit_s: longest run time of an attempt; Slurm's own word on the end comes before it.
        save_grace_s / save_before_limit_s: the spec's; None means: from the measured steps and saves.
        hang_after_s: least time without any event of the driver after which it counts as hung.
        needed_paths: model and data files that every node must see.
        doctor: check the nodes and end; no Ray, no driver.
    """

    run_dir: str
    code_dir: str
    python: str
    cluster: Literal["slurm", "local"]
    num_nodes: int
    ranks_per_node: int
    gpus_per_node: int
    cpus_per_node: int | None
    memory_bytes: int | None
    object_store_bytes: int
    environment: tuple[Variable, ...]
    nccl: NcclPin | None
    scratch: ScratchRequest
    interface: str | None
    driver_argv: tuple[str, ...]
    page_cache_roots: tuple[str, ...]
    resume: Literal["auto", "never"]
    max_attempts: int
    ready_deadline_s: float
    stop_grace_s: float
    memory_alarm: MemoryAlarm | None = None
    secrets: SecretSource | None = None
    dashboard: bool = False
    save_trigger: SaveTrigger | None = None
    time_limit_s: float | None = None
    save_grace_s: float | None = None
    save_before_limit_s: float | None = None
    hang_after_s: float = 3600.0
    needed_paths: tuple[str, ...] = ()
    doctor: bool = False
    version: int = VERSION

    def to_json(self) -> str:
        """Return the file's text, keys sorted so that equal handoffs are equal bytes."""
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"


def is_shell_setting(name: str) -> bool:
    """Say whether the variable `name` belongs to the shell that submits, and no job may inherit it.

    Python's and conda's name another environment's modules; a proxy of the login node takes traffic between nodes away.
    A spec that wants one says so in [env].
    """
    return (
        name.startswith(("PYTHON", "CONDA_", "_CONDA_", "_CE_", "MAMBA_"))
        or name == "VIRTUAL_ENV"
        or name.upper() in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY")
    )


def node_argv(handoff: Handoff) -> tuple[str, ...]:
    """Return the command that one Slurm task runs on each node, the same for every way of submitting.

    What would keep Python from starting, and secrets that a shell exported, are taken out before anything of ours starts.
    """
    names = () if handoff.secrets is None else handoff.secrets.names
    return (
        "/usr/bin/env",
        *(f"--unset={name}" for name in ("PYTHONHOME", *names)),
        f"PYTHONPATH={handoff.code_dir}",
        handoff.python,
        "-P",  # not the working directory: a checkout there would run instead of the frozen code
        "-m",
        "miles_hpc.node",
        handoff.run_dir,
    )


def read_handoff(path: Path) -> Handoff:
    """Read and check handoff.json.

    Raises:
        ResumeError: if the file is missing, is not JSON, or was written by another version of this package.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResumeError(
            f"{path}: {error}; expected the handoff file that submit or render writes. "
            "Submit the spec again into a new run folder."
        ) from error
    if not isinstance(raw, dict) or raw.get("version") != VERSION:
        found = raw.get("version") if isinstance(raw, dict) else type(raw).__name__
        raise ResumeError(
            f"{path}: found version {found}, expected {VERSION}. Run it with the package version that wrote it."
        )
    try:
        return Handoff(
            **{
                **raw,
                "environment": tuple(Variable(**entry) for entry in raw["environment"]),
                "nccl": _nccl_pin(raw["nccl"]),
                "scratch": ScratchRequest(**raw["scratch"]),
                "memory_alarm": None
                if raw.get("memory_alarm") is None
                else MemoryAlarm(**raw["memory_alarm"]),
                "secrets": _secret_source(raw.get("secrets")),
                "save_trigger": None
                if raw.get("save_trigger") is None
                else SaveTrigger(**raw["save_trigger"]),
                "driver_argv": tuple(raw["driver_argv"]),
                "page_cache_roots": tuple(raw["page_cache_roots"]),
                "needed_paths": tuple(raw.get("needed_paths", ())),
            }
        )
    except (KeyError, TypeError) as error:
        raise ResumeError(
            f"{path}: {error}; expected the keys of version {VERSION}. Submit the spec again into a new run folder."
        ) from error


def _secret_source(raw: dict[str, object] | None) -> SecretSource | None:
    if raw is None:
        return None
    names = raw["names"]
    if not isinstance(names, list):
        raise TypeError(f"secrets.names: found {type(names).__name__}, expected a list")
    return SecretSource(
        names=tuple(str(name) for name in names),
        path=str(raw["path"]),
        is_stored=bool(raw["is_stored"]),
    )


def _nccl_pin(raw: dict[str, object] | None) -> NcclPin | None:
    if raw is None:
        return None
    denied = raw.get("denied", [])
    if not isinstance(denied, list):
        raise TypeError(f"nccl.denied: found {type(denied).__name__}, expected a list")
    pinned = {**raw, "denied": tuple(DeniedNccl(**entry) for entry in denied)}
    return NcclPin(**pinned)  # type: ignore[arg-type]
