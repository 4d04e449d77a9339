"""The recipes that come with the package: what there is and what each needs.

A recipe is a file of jobs/. The comments at its head say what it is, its node type (`# node: H200`) and, where the
launcher it follows breaks rules, which (`# violates: MH202 MH203`). Knows no table of the spec but what it lists.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path

from miles_hpc.engine.compose import memory_of
from miles_hpc.errors import SpecError
from miles_hpc.paths import packaged
from miles_hpc.plan.engine_sizes import ENGINE_SIZE_CHECKS
from miles_hpc.plan.findings import errors_of, run_checks
from miles_hpc.plan.grid import ranks_per_node
from miles_hpc.plan.layout import LAYOUT_CHECKS
from miles_hpc.spec.faults import format_value
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.load import load_spec

_HEAD = ("recipe", "model", "nodes", "type", "engine", "GPU", "host", "disk")
_NUMERIC = (False, False, False, False, False, True, True, True)
_NOTE = re.compile(r"^# (node|violates): (.+)$", re.M)
_SENTENCE = re.compile(r"^# (?!node:|violates:)(\S.*)$", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One recipe.

    Attributes:
        about: its first sentence.
        node: type of its nodes, as its head says.
        host_bytes_per_node: memory of the largest phase without page cache; None when the layout is impossible.
        gpu_bytes_per_gpu: the same of a GPU; None for CPU nodes.
        scratch_bytes_per_node: disk that the sleeping trainer takes.
        violates: ids of the rules that refuse it.
    """

    name: str
    about: str
    model: str
    engine: str
    num_nodes: int
    ranks_per_node: int
    node: str
    host_bytes_per_node: int | None
    gpu_bytes_per_gpu: int | None
    scratch_bytes_per_node: int
    violates: tuple[str, ...]


def recipe_paths() -> tuple[Path, ...]:
    """Return the files of the recipes, by name."""
    return tuple(sorted(packaged("jobs").glob("*.toml")))


def recipe_path(name: str) -> Path:
    """Return the file of the recipe called `name`.

    Raises:
        SpecError: when there is none.
    """
    names = [path.stem for path in recipe_paths()]
    if name in names:
        return packaged("jobs") / f"{name}.toml"
    close = get_close_matches(name, names, n=1)
    fix = f'Nearest "{close[0]}"' if close else f"Name one, such as {names[0]}"
    raise SpecError(
        f"recipe: found {format_value(name) if name else 'none'}; expected one of the {len(names)} that"
        f" `miles-hpc jobs` lists. {fix}"
    )


def read_recipe(path: Path) -> Recipe:
    """Return what the recipe at `path` is and needs."""
    text = path.read_text(encoding="utf-8")
    notes: Mapping[str, str] = dict(_NOTE.findall(text))
    about = _SENTENCE.search(text)
    spec = load_spec(path).spec
    violates = tuple(notes.get("violates", "").split())
    host, gpu, scratch = _needs(spec)
    return Recipe(
        name=path.stem,
        about="" if about is None else about[1],
        model=spec.model.name,
        engine=spec.job.engine,
        num_nodes=spec.cluster.num_nodes,
        ranks_per_node=ranks_per_node(spec),
        node=notes.get("node", "CPU" if spec.cluster.device == "cpu" else "GPU"),
        host_bytes_per_node=host,
        gpu_bytes_per_gpu=gpu,
        scratch_bytes_per_node=scratch,
        violates=violates,
    )


def _needs(spec: JobSpec) -> tuple[int | None, int | None, int]:
    """Return the host memory, GPU memory and scratch space that the largest phases take."""
    if errors_of(run_checks((*LAYOUT_CHECKS, *ENGINE_SIZE_CHECKS), spec)):
        return None, None, 0
    memory = memory_of(spec)
    scratch = max(phase.scratch_bytes_per_node for phase in memory.everywhere)
    gpu = memory.gpu_peak.gpu_bytes_per_gpu if spec.cluster.device == "gpu" else None
    return memory.host_peak.committed_host_bytes, gpu, scratch


def list_recipes(*, as_json: bool) -> str:
    """Return all recipes as a table, or as JSON."""
    recipes = [read_recipe(path) for path in recipe_paths()]
    return catalogue_json(recipes) if as_json else catalogue_table(recipes).rstrip("\n")


def catalogue_json(recipes: Sequence[Recipe]) -> str:
    """Return the recipes as one JSON object."""
    return json.dumps({"recipes": [asdict(recipe) for recipe in recipes]}, indent=2)


def catalogue_table(recipes: Sequence[Recipe]) -> str:
    """Return the recipes as a table of at most 100 columns, then which of them are refused and by what."""
    rows = [_HEAD, *(_row(recipe) for recipe in recipes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = []
    for row in rows:
        cells = zip(row, widths, _NUMERIC, strict=True)
        padded = [cell.rjust(size) if right else cell.ljust(size) for cell, size, right in cells]
        lines.append("  ".join(padded).rstrip())
    lines += [
        "",
        "GiB in the largest phase: of a GPU, of a node's host memory, of its scratch disk.",
    ]
    refused = [recipe for recipe in recipes if recipe.violates]
    if refused:
        lines += ["", "Refused by the planner with the values of their launchers, by these rules:"]
        lines += [f"  {recipe.name}: {', '.join(recipe.violates)}" for recipe in refused]
    return "\n".join(lines) + "\n"


def _row(recipe: Recipe) -> tuple[str, ...]:
    needs = (recipe.gpu_bytes_per_gpu, recipe.host_bytes_per_node, recipe.scratch_bytes_per_node)
    size = f"{recipe.num_nodes}x{recipe.ranks_per_node}"
    figures = (_gib(count) if count else "-" for count in needs)
    return recipe.name, recipe.model, size, recipe.node, recipe.engine, *figures


def _gib(count: int) -> str:
    return f"{count / 2**30:.0f}" if count >= 10 * 2**30 else f"{count / 2**30:.1f}"
