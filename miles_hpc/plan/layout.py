"""The layout of a job: the trainer's grid and the rollout engines, refused when something does not divide.

The rules are `grid`, `division`, `pipeline` and `engine_sizes`; which rank sits where is `placement`.
"""

from miles_hpc.plan.division import DIVISION_CHECKS
from miles_hpc.plan.engine_sizes import ENGINE_SIZE_CHECKS
from miles_hpc.plan.findings import refuse, run_checks
from miles_hpc.plan.grid import (
    GRID_CHECKS,
    ranks_per_node,
    rollout_gpus_per_node,
    rollout_size,
    world_size,
)
from miles_hpc.plan.pipeline import PIPELINE_CHECKS
from miles_hpc.plan.plan import Layout, RolloutLayout
from miles_hpc.spec.job import JobSpec

LAYOUT_CHECKS = (*GRID_CHECKS, *DIVISION_CHECKS, *PIPELINE_CHECKS)


def make_layout(spec: JobSpec) -> Layout:
    """Return the trainer's grid.

    Raises:
        PlanError: naming every grid rule that the spec breaks, with the arithmetic and a change that fits.
    """
    refuse(run_checks(LAYOUT_CHECKS, spec))
    parallel = spec.parallel
    world = world_size(spec)
    return Layout(
        world_size=world,
        tp=parallel.tp,
        pp=parallel.pp,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.etp,
        dp=world // (parallel.tp * parallel.pp * parallel.cp),
        edp=world // (parallel.etp * parallel.ep * parallel.pp),
        num_nodes=spec.cluster.num_nodes,
        gpus_per_node=spec.cluster.gpus_per_node,
        ranks_per_node=ranks_per_node(spec),
    )


def make_rollout_layout(spec: JobSpec) -> RolloutLayout:
    """Return the rollout engines, which tile all GPUs of the job, or those that they have for themselves.

    Raises:
        PlanError: naming every sizing rule that the spec breaks.
    """
    refuse(run_checks((*GRID_CHECKS[:2], *ENGINE_SIZE_CHECKS), spec))
    size = spec.rollout.gpus_per_engine
    return RolloutLayout(
        num_engines=rollout_size(spec) // size,
        gpus_per_engine=size,
        nodes_per_engine=max(1, size // rollout_gpus_per_node(spec)),
    )
