"""The list: what is checked on a node, in the order of the table."""

from collections.abc import Callable, Iterable

from miles_hpc.handoff import Handoff
from miles_hpc.node.checks import gpu, host
from miles_hpc.node.checks.observation import Observation
from miles_hpc.run.node_report import NodeFinding

Check = Callable[[Observation, Handoff], Iterable[NodeFinding]]

CHECKS: tuple[Check, ...] = (
    host.check_interpreter,
    host.check_nccl,
    gpu.check_gpus,
    gpu.check_gpu_health,
    gpu.check_driver,
    host.check_memory,
    host.check_memory_left,
    host.check_shared_memory,
    host.check_limits,
    host.check_scratch,
    host.check_run_folder,
    host.check_paths,
    host.check_secrets,
)


def check_all(seen: Observation, handoff: Handoff) -> tuple[NodeFinding, ...]:
    """Return what every check finds on one node."""
    return tuple(finding for check in CHECKS for finding in check(seen, handoff))
