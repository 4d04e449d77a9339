"""Which values of a spec a saved state depends on: a run that continues must keep them, and may change all others.

Pure; the native trainer writes `state_layout` beside its state and demands it again, `resume` compares two specs before
anything is queued. Knows no checkpoint on disk.
"""

from miles_hpc.plan.grid import world_size
from miles_hpc.spec.job import JobSpec

STREAMED = "offload.stream_optimizer"
_TOPOLOGY = ("tp", "pp", "cp", "ep", "etp")


def state_layout(spec: JobSpec) -> dict[str, object]:
    """Return what the native trainer's files depend on, by the names of layout.json."""
    lora, parallel, model = spec.lora, spec.parallel, spec.model
    return {
        "model": model.name,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "first_stage_layers": parallel.first_stage_layers,
        "last_stage_layers": parallel.last_stage_layers,
        "lora_rank": None if lora is None else lora.rank,
        "target_modules": None if lora is None else sorted(lora.target_modules),
        STREAMED: spec.offload.stream_optimizer,
    }


def kept_values(spec: JobSpec) -> dict[str, object]:
    """Return every value that the state of `spec`'s engine is tied to, by key path."""
    model, parallel, lora = spec.model, spec.parallel, spec.lora
    kept: dict[str, object] = {
        "job.engine": spec.job.engine,
        "model.name": model.name,
        "model.num_layers": model.num_layers,
        "model.hidden_size": model.hidden_size,
        "lora.rank": None if lora is None else lora.rank,
        "lora.target_modules": None if lora is None else sorted(lora.target_modules),
        STREAMED: spec.offload.stream_optimizer,
    }
    if spec.job.engine == "native":
        names = ("tp", "pp", "first_stage_layers", "last_stage_layers")
        kept |= {f"parallel.{name}": getattr(parallel, name) for name in names}
    if spec.offload.stream_optimizer:
        # Each rank's state on disk is its own part of the optimizer, cut into buckets of one size.
        kept |= {f"parallel.{name}": getattr(parallel, name) for name in _TOPOLOGY}
        kept["world size"] = world_size(spec)
        kept["offload.optimizer_bucket"] = int(spec.offload.optimizer_bucket)
    return kept


def broken_ties(saved: JobSpec, now: JobSpec) -> tuple[str, ...]:
    """Return each value that `now` changes and the state saved under `saved` is tied to."""
    before, after = kept_values(saved), kept_values(now)
    return tuple(
        f"{key} = {before.get(key)} when it was saved, now {after.get(key)}"
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
    )


def legal_change(saved: JobSpec) -> str:
    """Say which topology the state saved under `saved` can continue on."""
    parallel = saved.parallel
    if saved.offload.stream_optimizer:
        sizes = ", ".join(f"{name} = {getattr(parallel, name)}" for name in _TOPOLOGY)
        return (
            f"with {STREAMED} the same topology alone: {sizes} on {world_size(saved)} ranks, "
            "placed on any number of nodes"
        )
    if saved.job.engine == "native":
        group = parallel.tp * parallel.pp
        return (
            f"tp = {parallel.tp} and pp = {parallel.pp} on any multiple of {group} ranks (dp may change), "
            "placed on any number of nodes"
        )
    return "any topology that the plan accepts; Miles' own checkpoint may demand more"
