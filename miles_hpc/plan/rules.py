"""All rules of this package that need more than one key, and the search for a spec that keeps them.

The rules themselves stand beside the arithmetic they check: `layout`, `batch`, `colocation`, `resources`, `environ`.
Engines add theirs in `miles_hpc.engine`.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice

from miles_hpc.plan.batch import BATCH_CHECKS, samples_per_step
from miles_hpc.plan.colocation import COLOCATION_CHECKS
from miles_hpc.plan.engine_sizes import ENGINE_SIZE_CHECKS
from miles_hpc.plan.environ import ENVIRONMENT_CHECKS
from miles_hpc.plan.findings import Check, Finding, errors_of
from miles_hpc.plan.grid import ranks_per_node, rollout_size
from miles_hpc.plan.layout import LAYOUT_CHECKS
from miles_hpc.plan.resources import RESOURCE_CHECKS
from miles_hpc.spec.job import JobSpec

CHECKS: tuple[Check, ...] = (
    *LAYOUT_CHECKS,
    *ENGINE_SIZE_CHECKS,
    *BATCH_CHECKS,
    *COLOCATION_CHECKS,
    *RESOURCE_CHECKS,
    *ENVIRONMENT_CHECKS,
)

Findings = Callable[[JobSpec], Sequence[Finding]]
_SIZES = (
    "parallel.ep",
    "parallel.cp",
    "parallel.pp",
    "parallel.tp",
    "rollout.gpus_per_engine",
    "rollout.own_gpus",
    "train.global_batch_size",
    "train.micro_batch_size",
    "cluster.num_nodes",
)
_MOST_TRIALS = 3000
_CHOICE_DISTANCE = 0.5
"""Distance of another choice than a size: less than doubling or halving something."""

Change = dict[str, int | str]


def value_at(spec: JobSpec, key: str) -> object:
    """Return the value of `key`, a table and a name joined by a dot."""
    table, _, name = key.partition(".")
    value: object = getattr(getattr(spec, table), name)
    return value


def with_value(spec: JobSpec, key: str, value: object) -> JobSpec:
    """Return `spec` with the value of `key` replaced; `value` must be of the key's type."""
    table, _, name = key.partition(".")
    changed = getattr(spec, table).model_copy(update={name: value})
    return spec.model_copy(update={table: changed})


def nearest_fits(spec: JobSpec, findings: Findings, *, most: int = 3) -> tuple[str, ...]:
    """Return up to `most` smallest changes of sizes after which `findings` has no error, as phrases.

    One key is changed, or two when no single one is enough; the distance of a change is the sum of |log2(new / old)|.
    The smallest number of nodes that fits with nothing else changed is always among them when there is one.
    """
    ones: list[Change] = [{key: value} for key in _SIZES for value in _candidates(spec, key)]
    ones += _choices(spec)
    found = [change for change in ones if not errors_of(findings(_changed(spec, change)))]
    if not found:
        pairs = sorted(
            (
                {**first, **second}
                for first, second in combinations(ones, 2)
                if not first.keys() & second.keys()
            ),
            key=lambda change: _distance(spec, change),
        )
        fitting = (c for c in pairs[:_MOST_TRIALS] if not errors_of(findings(_changed(spec, c))))
        found = list(islice(fitting, most))
    found.sort(key=lambda change: _distance(spec, change))
    nodes = [change for change in found if change.keys() == {"cluster.num_nodes"}]
    if nodes:
        smallest = min(nodes, key=lambda change: int(change["cluster.num_nodes"]))
        found = [smallest, *[change for change in found if change not in nodes]]
    return tuple(_phrase(change) for change in found[:most])


def _phrase(change: Change) -> str:
    return " and ".join(f"set {key} = {json.dumps(value)}" for key, value in change.items())


def _choices(spec: JobSpec) -> list[Change]:
    """Return other choices than sizes that are worth trying."""
    offload = spec.offload
    both_sleep = spec.cluster.device == "gpu" and "none" not in (offload.train, offload.rollout)
    return [{"offload.peak_device": "gpu"}] if both_sleep and offload.peak_device == "cpu" else []


def _changed(spec: JobSpec, change: Change) -> JobSpec:
    for key, value in change.items():
        spec = with_value(spec, key, value)
    return spec


def _distance(spec: JobSpec, change: Change) -> float:
    return sum(
        _CHOICE_DISTANCE if isinstance(value, str) else abs(math.log2(value / _current(spec, key)))
        for key, value in change.items()
    )


def _current(spec: JobSpec, key: str) -> int:
    value = value_at(spec, key)
    if isinstance(value, int):
        return value
    return samples_per_step(spec) if key == "train.global_batch_size" else 1


def _candidates(spec: JobSpec, key: str) -> Iterator[int]:
    """Yield other values of `key` worth trying: divisors of what the key divides."""
    now = _current(spec, key)
    if key == "train.micro_batch_size" and spec.train.micro_batch_size is None:
        return
    if key == "cluster.num_nodes":
        yield from _node_counts(spec)
        return
    if key == "rollout.own_gpus":
        yield from _own_counts(spec)
        return
    whole = {
        "parallel.tp": spec.model.num_attention_heads,
        "parallel.pp": spec.model.num_layers,
        "parallel.cp": 32,
        "parallel.ep": spec.model.num_experts or 1,
        "rollout.gpus_per_engine": rollout_size(spec),
        "train.global_batch_size": samples_per_step(spec),
        "train.micro_batch_size": samples_per_step(spec),
    }[key]
    divisors = [count for count in range(1, min(whole, 4096) + 1) if whole % count == 0]
    if key == "parallel.pp":
        divisors = sorted({*divisors, 1, 2, 4, 8, 16})
    yield from (count for count in divisors if count != now)


def _own_counts(spec: JobSpec) -> list[int]:
    """Return other numbers of GPUs that rollout engines could have for themselves; none where both sides share all."""
    own, nodes, per_node = spec.rollout.own_gpus, spec.cluster.num_nodes, ranks_per_node(spec)
    if own is None:
        return []
    unit = 1 if nodes == 1 else per_node
    return [count for count in range(unit, nodes * per_node, unit) if count != own]


def _node_counts(spec: JobSpec) -> list[int]:
    """Return node counts near the spec's, at its doublings, and those that the grids and engines divide."""
    p, now = spec.parallel, spec.cluster.num_nodes
    own, per_node = spec.rollout.own_gpus, ranks_per_node(spec) or 1
    engine = spec.rollout.gpus_per_engine if own is None else 1
    ranks = math.lcm(p.tp * p.pp * p.cp, p.etp * p.ep * p.pp, engine)
    step, more = ranks // math.gcd(ranks, per_node), (own or 0) // per_node
    whole = {step * count + more for count in range(1, 9)} | {-(-now // step) * step}
    near = {now + offset for offset in range(-8, 9)}
    scaled = {round(now * factor) for factor in (0.25, 0.5, 0.75, 1.5, 2, 3, 4, 6, 8)}
    return sorted(count for count in near | scaled | whole if count >= 1 and count != now)
