"""How long planning takes as a job grows, and how long a refusal with its nearest fits takes.

    python tests/bench/plan.py [--runs 25]

In one process: what `miles-hpc plan --json` does beside starting up, reading the spec included.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from miles_hpc.engine.compose import draft_plan
from miles_hpc.spec.load import load_spec

ROOT = Path(__file__).resolve().parents[2]
NODES = (1, 16, 512, 4096)
"""Of 8 GPUs each: from the recipe's own node to 32,768 GPUs."""


def timed_plans(
    paths: Sequence[tuple[Path, tuple[str, ...]]], runs: int
) -> list[tuple[str, float]]:
    """Return the text of `plan --json` and the median seconds of each spec with its overrides.

    The specs take turns, so that what else the machine does falls on all of them.
    """
    seconds: list[list[float]] = [[] for _ in paths]
    texts = [""] * len(paths)
    for _ in range(runs):
        for index, (path, overrides) in enumerate(paths):
            started = time.perf_counter()
            loaded = load_spec(path, overrides=overrides)
            draft = draft_plan(
                loaded.spec,
                python=sys.executable,
                package_version="bench",
                overrides=loaded.overrides,
                hashes=loaded.hashes,
                position=loaded.position,
            )
            texts[index] = draft.to_json()
            seconds[index].append(time.perf_counter() - started)
    return [(text, statistics.median(times)) for text, times in zip(texts, seconds, strict=True)]


def scaled(nodes: int) -> tuple[str, ...]:
    """Return the overrides that make the one-node recipe one of `nodes`, its batch growing with them."""
    return (
        f"cluster.num_nodes={nodes}",
        f"rollout.prompts_per_step={4 * nodes}",
        f"train.global_batch_size={8 * nodes}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=25)
    runs = parser.parse_args().runs
    recipe = ROOT / "jobs" / "qwen38_4layer.toml"
    print(f"jobs/{recipe.name}, medians of {runs}, Python {sys.version.split()[0]}")
    results = timed_plans([(recipe, scaled(nodes)) for nodes in NODES], runs)
    smallest = results[0][1]
    for nodes, (text, seconds) in zip(NODES, results, strict=True):
        errors = sum(finding["level"] == "error" for finding in json.loads(text)["findings"])
        print(
            f"{nodes:>5} nodes {seconds * 1000:8.1f} ms  {seconds / smallest:5.2f} x  {len(text)} bytes"
            f"  {errors} errors"
        )
    full = ROOT / "jobs" / "qwen38_full.toml"
    refused = (
        ("one key away", ("offload.peak_device=cpu",)),
        ("two keys away", ("parallel.ep=24", "parallel.pp=5")),
    )
    for (name, _), (text, seconds) in zip(
        refused,
        timed_plans([(full, overrides) for _, overrides in refused], max(1, runs // 8)),
        strict=True,
    ):
        fits = "; or ".join(json.loads(text)["would_fit"])
        print(f"jobs/{full.name} refused, {name:<14} {seconds * 1000:8.1f} ms  {fits}")


if __name__ == "__main__":
    main()
