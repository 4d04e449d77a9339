"""The environment of Ray's daemons and of the driver on this node.

The agent's own environment without what would change Ray, Python or NCCL behind the plan's back, then the agent's variables,
then the handoff's. Nothing travels through Slurm's `--export`, which cuts values at commas. Pure: knows no process.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from miles_hpc.handoff import is_shell_setting
from miles_hpc.node.context import NodeContext
from miles_hpc.node.network import Interface, nccl_interface
from miles_hpc.node.survivors import TAG_VARIABLE
from miles_hpc.preload import site_preload
from miles_hpc.probe.nccl_hook import PYTHON_START

# RAY_*: a foreign Ray's address, token or flags from the user's shell.
# MILES_HPC_*, SUBMITIT_*, SBATCH_*, SRUN_*: an outer job's, or for the submission alone.
_SCRUBBED_PREFIXES = ("RAY_", "MILES_HPC_", "SUBMITIT_", "SBATCH_", "SRUN_")
# Of SLURM_*, what Slurm sets in every step. All else may be left from an allocation around the one that submitted.
_KEPT_SLURM = frozenset(
    {
        "SLURM_CLUSTER_NAME", "SLURM_CONF", "SLURM_JOBID", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES",
        "SLURM_JOB_PARTITION", "SLURM_JOB_UID", "SLURM_JOB_USER", "SLURM_LOCALID", "SLURM_NNODES", "SLURM_NODEID",
        "SLURM_NODELIST", "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEPID", "SLURM_STEP_ID", "SLURM_TMPDIR",
    }
)  # fmt: skip


def without_foreign_settings(
    environ: Mapping[str, str], secret_names: Collection[str] = ()
) -> dict[str, str]:
    """Return `environ` without secrets and without the variables that would lead Ray or Python elsewhere.

    Of LD_PRELOAD the site's libraries stay; NCCL reaches only the actors that use it.
    """
    site = site_preload(environ.get("LD_PRELOAD", ""))
    kept = {
        name: value
        for name, value in environ.items()
        if name != "LD_PRELOAD"
        and name not in secret_names
        and not name.startswith(_SCRUBBED_PREFIXES)
        and not is_shell_setting(name)
        and (not name.startswith("SLURM_") or name in _KEPT_SLURM)
    }
    return {**kept, "LD_PRELOAD": site} if site else kept


def node_environment(
    context: NodeContext,
    base: Mapping[str, str],
    *,
    scratch: Path,
    temp: Path,
    nccl: Path | None,
    interface: Interface,
) -> dict[str, str]:
    """Return the environment of Ray's daemons on this node, and so of every worker."""
    handoff = context.handoff
    own = {
        "PYTHONPATH": f"{PYTHON_START}:{handoff.code_dir}",
        "TMPDIR": str(temp),
        "MILES_HPC_RUN_DIR": str(context.run.root),
        "MILES_HPC_ATTEMPT_DIR": str(context.attempt.root),
        "MILES_HPC_NODE": context.node,
        "MILES_HPC_NODE_INDEX": str(context.identity.node_index),
        "MILES_HPC_EVENTS": str(context.events.path),
        "MILES_HPC_SCRATCH": str(scratch),
        "MILES_HPC_NCCL": str(nccl) if nccl is not None else "",
        TAG_VARIABLE: context.job_tag,
        # Explicit, because Ray turns authentication on when it finds any token file of the user.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(context.rendezvous.token),
        # A raylet drains for up to 30 s before it ends; at our teardown nothing is left to drain.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Without it an actor with num_gpus=0 gets an empty CUDA_VISIBLE_DEVICES and cannot share its bundle's GPU.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Gloo wants one name; without it the host's name is resolved, which may be 127.0.1.1 or nothing.
        "GLOO_SOCKET_IFNAME": interface.name,
    }
    if handoff.interface:
        own["NCCL_SOCKET_IFNAME"] = nccl_interface(handoff.interface, interface)
    chosen = {entry.name: entry.value for entry in handoff.environment if entry.scope == "ray"}
    secrets = () if handoff.secrets is None else handoff.secrets.names
    return {**without_foreign_settings(base, secrets), **own, **chosen}


def driver_environment(
    context: NodeContext,
    node_environ: Mapping[str, str],
    ray_address: str,
    secrets: Mapping[str, str],
) -> dict[str, str]:
    """Return the driver's environment: the node's, the address of the job's Ray, and the driver's own variables."""
    chosen = {
        entry.name: entry.value for entry in context.handoff.environment if entry.scope == "driver"
    }
    return {**node_environ, "RAY_ADDRESS": ray_address, **chosen, **secrets}


def fill_placeholders(argv: tuple[str, ...], values: Mapping[str, str]) -> tuple[str, ...]:
    """Return `argv` with each `{name}` of `values` replaced; other braces stay as they are."""
    if not values:
        return argv
    names = re.compile("|".join(re.escape("{" + name + "}") for name in values))
    return tuple(names.sub(lambda match: values[match[0][1:-1]], argument) for argument in argv)
