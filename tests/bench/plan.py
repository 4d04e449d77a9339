"""How long planning takes as a job grows, and how long a refusal with its nearest fits takes.

    python tests/bench/plan.py [--runs 9]

In one process, the spec already loaded: what `miles-hpc plan` does beside starting up. Prints medians.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

from miles_hpc.engine.compose import Draft, draft_plan
from miles_hpc.plan.rules import with_value
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.load import load_spec

ROOT = Path(__file__).resolve().parents[2]
NODES = (16, 512, 1024, 4096)
"""Of 4 GPUs each: the recipe's own size, 2,048, 4,096 and 16,384 GPUs."""


def timed_plan(spec: JobSpec, runs: int) -> tuple[Draft, float]:
    """Return the plan of `spec` and the median seconds to make it and its JSON text."""
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        draft = draft_plan(spec, python=sys.executable, package_version="bench")
        if draft.plan is not None:
            draft.plan.to_json()
        seconds.append(time.perf_counter() - started)
    return draft, statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9)
    runs = parser.parse_args().runs
    recipe = load_spec(ROOT / "jobs" / "qwen38_full.toml").spec
    print(f"jobs/qwen38_full.toml, {runs} runs, {sys.version.split()[0]}")
    smallest = None
    for nodes in NODES:
        spec = with_value(
            with_value(recipe, "cluster.num_nodes", nodes), "train.global_batch_size", None
        )
        spec = with_value(spec, "rollout.prompts_per_step", nodes * 2)
        draft, seconds = timed_plan(spec, runs)
        smallest = smallest or seconds
        size = len(draft.plan.to_json()) if draft.plan else 0
        print(
            f"{nodes:>5} nodes {seconds * 1000:8.1f} ms  {seconds / smallest:5.2f} x  {size} bytes"
        )
    for name, changes in (
        ("one key away", {"offload.peak_device": "cpu"}),
        ("two keys away", {"parallel.ep": 24, "parallel.pp": 5}),
    ):
        spec = recipe
        for key, value in changes.items():
            spec = with_value(spec, key, value)
        draft, seconds = timed_plan(spec, max(1, runs // 3))
        print(f"refused, {name:<14} {seconds * 1000:8.1f} ms  {'; or '.join(draft.would_fit)}")


if __name__ == "__main__":
    main()
