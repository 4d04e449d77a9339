"""Memory by phase where rollout engines have GPUs of their own: the trainer's nodes and theirs, each at its own work.

Neither side sleeps, so that there is no handoff and no backup. On one node that both divide, its host memory holds both.
Pure arithmetic over `sides`.
"""

from miles_hpc.plan.grid import rollout_gpus_per_node
from miles_hpc.plan.phases import PHASES, Phase, PhaseName, make_phase
from miles_hpc.plan.sides import (
    GPU_RUNTIME_BYTES,
    OBJECT_STORE_BYTES,
    RESIDUAL_BYTES_PER_RANK,
    RESIDUAL_WEIGHT_FRACTION,
    Sides,
    engine_file_bytes,
    pinned_parts,
    saved_bytes,
    scratch_parts,
    trainer_file_bytes,
)

_NAMES: tuple[PhaseName, ...] = tuple(name for name in PHASES if name != "handoff")


def trainer_phases(sides: Sides, room: int | None) -> tuple[Phase, ...]:
    """Return the phases of a node and a GPU that trainer ranks are on.

    Args:
        sides: both sides of the job.
        room: host memory of a node, which the page cache does not pass; None when it is not known.
    """
    return tuple(
        make_phase(name, _host(sides, name, room), _trainer_gpu(sides, name), scratch_parts(sides))
        for name in _NAMES
    )


def rollout_phases(sides: Sides, room: int | None) -> tuple[Phase, ...]:
    """Return the phases of a node and a GPU that rollout engines have for themselves."""
    shares_node = sides.spec.cluster.num_nodes == 1
    return tuple(
        make_phase(
            name,
            _host(sides, name, room) if shares_node else _rollout_host(sides, name, room),
            _rollout_gpu(sides, name),
            scratch_parts(sides) if shares_node else {},
        )
        for name in _NAMES
    )


def _trainer_gpu(sides: Sides, name: PhaseName) -> dict[str, int]:
    more = {
        "train": sides.working_set(),
        "weight_sync": {"update_buffer": sides.traits.update_buffer},
    }.get(name, {})
    return {**sides.trainer_awake(), **more, "runtime": GPU_RUNTIME_BYTES}


def _rollout_gpu(sides: Sides, name: PhaseName) -> dict[str, int]:
    buffer = {"update_buffer": sides.traits.update_buffer} if name == "weight_sync" else {}
    return {**sides.engine_awake(), **buffer, "runtime": GPU_RUNTIME_BYTES}


def _host(sides: Sides, name: PhaseName, room: int | None) -> dict[str, int]:
    """Return the host memory of a node with trainer ranks, and of the engines that are on it."""
    engines = rollout_gpus_per_node(sides.spec) if sides.spec.cluster.num_nodes == 1 else 0
    weights = sides.ranks * RESIDUAL_WEIGHT_FRACTION * sides.most_weights
    parts = {**_every_node(sides.ranks + engines, round(weights)), **pinned_parts(sides)}
    if name == "save":
        parts["checkpoint_staging"] = sides.ranks * saved_bytes(sides)
    files = trainer_file_bytes(sides)
    if engines:
        files += engine_file_bytes(sides)
    return _with_cache(sides, name, parts, files, room)


def _rollout_host(sides: Sides, name: PhaseName, room: int | None) -> dict[str, int]:
    parts = _every_node(rollout_gpus_per_node(sides.spec), 0)
    return _with_cache(sides, name, parts, engine_file_bytes(sides), room)


def _every_node(gpus: int, weights: int) -> dict[str, int]:
    """Return Ray's object store, and what hosts were seen to hold for each GPU and its trainer weights."""
    store = OBJECT_STORE_BYTES["gpu"]
    seen = gpus * RESIDUAL_BYTES_PER_RANK + weights
    return {"object_store": store, "residual": max(0, seen - store)}


def _with_cache(
    sides: Sides, name: PhaseName, parts: dict[str, int], files: int, room: int | None
) -> dict[str, int]:
    """Return `parts` with the page cache of the checkpoint files while it is there, at most the room that is left."""
    if name != "load" and sides.spec.offload.drop_page_cache:
        return parts
    left = files if room is None else max(0, min(files, room - sum(parts.values())))
    return {**parts, "page_cache": left}
