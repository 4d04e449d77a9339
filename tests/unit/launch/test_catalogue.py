"""Every recipe loads, and plans or is refused by the rules that its head names; what it needs is golden.

`pytest tests/unit/launch --update-golden` after a wanted change.
"""

import json
import re

import pytest

from miles_hpc.engine.compose import find, memory_of
from miles_hpc.errors import SpecError
from miles_hpc.launch.catalogue import (
    catalogue_json,
    catalogue_table,
    read_recipe,
    recipe_path,
    recipe_paths,
)
from miles_hpc.plan.findings import errors_of
from miles_hpc.plan.layout import make_layout, make_rollout_layout
from miles_hpc.spec.load import load_spec
from tests.fakes.recipes import CATALOGUE, ROOT

GOLDEN = ROOT / "tests" / "golden" / "catalogue"


@pytest.fixture(scope="module")
def recipes():
    return [read_recipe(path) for path in recipe_paths()]


def summary(path) -> dict[str, object]:
    """Return what matters of a recipe's plan."""
    spec = load_spec(path).spec
    findings = find(spec)
    shown: dict[str, object] = {
        "findings": [[finding.id, finding.level] for finding in findings],
    }
    if not {"MH202", "MH203"} & {finding.id for finding in findings}:
        memory = memory_of(spec)
        layout, rollout = make_layout(spec), make_rollout_layout(spec)
        shown["layout"] = {
            name: getattr(layout, name) for name in ("world_size", "tp", "pp", "cp", "ep", "dp")
        }
        shown["rollout"] = {
            name: getattr(rollout, name)
            for name in ("num_engines", "gpus_per_engine", "nodes_per_engine")
        }
        shown["peaks"] = {
            "host": [memory.host_peak.name, memory.host_peak.committed_host_bytes],
            "gpu": [memory.gpu_peak.name, memory.gpu_peak.gpu_bytes_per_gpu],
            "scratch": max(phase.scratch_bytes_per_node for phase in memory.phases),
        }
    return shown


@pytest.mark.parametrize("path", CATALOGUE, ids=lambda path: path.stem)
def test_a_recipe_is_refused_by_exactly_the_rules_that_it_names(path):
    refused_by = {finding.id for finding in errors_of(find(load_spec(path).spec))}
    assert refused_by == set(read_recipe(path).violates)


@pytest.mark.parametrize("path", CATALOGUE, ids=lambda path: path.stem)
def test_what_a_recipe_needs_is_golden(path, update_golden):
    golden = GOLDEN / f"{path.stem}.json"
    text = json.dumps(summary(path), indent=1) + "\n"
    if update_golden:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert golden.read_text(encoding="utf-8") == text


def test_every_golden_file_has_its_recipe():
    assert {path.stem for path in GOLDEN.iterdir()} == {path.stem for path in CATALOGUE}


def test_the_two_known_faults_of_launchers_are_in_the_catalogue():
    assert read_recipe(recipe_path("glm52_16x8")).violates == ("MH202", "MH203")
    assert "MH202" in read_recipe(recipe_path("glm45_355b_8x4")).violates


@pytest.mark.parametrize("path", CATALOGUE, ids=lambda path: path.stem)
def test_a_recipe_says_where_it_comes_from_and_on_which_nodes(path):
    head = path.read_text(encoding="utf-8").split("\n[", 1)[0]
    spec = load_spec(path).spec
    if spec.job.engine == "miles":
        assert re.search(r"^# Source.*radixark/miles", head, re.M)
        assert re.search(r"^# node: (B300|GB200|GB300|H100|H200)$", head, re.M)
        assert spec.cluster.node_memory and spec.cluster.gpu_memory
    assert spec.model.shape_source


def test_recipes_share_their_models_and_parts():
    used = {
        name
        for path in CATALOGUE
        for name in re.findall(r'"((?:models|parts)/[^"]+)"', path.read_text(encoding="utf-8"))
    }
    there = {
        f"{folder}/{path.name}"
        for folder in ("models", "parts")
        for path in (ROOT / "jobs" / folder).iterdir()
    }
    assert used == there


def test_the_table_fits_a_terminal_and_names_every_recipe(recipes):
    lines = catalogue_table(recipes).splitlines()
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines[1 : len(recipes) + 1]] == [r.name for r in recipes]
    by_name = {line.split()[0]: line.split() for line in lines[1 : len(recipes) + 1]}
    assert by_name["qwen38_full"][1:5] == ["Qwen3.8-2.4T-A95B", "16x4", "GB300", "miles"]
    assert "  glm52_16x8: MH202, MH203" in lines


def test_the_json_has_the_same_recipes(recipes):
    shown = json.loads(catalogue_json(recipes))["recipes"]
    assert [entry["name"] for entry in shown] == [recipe.name for recipe in recipes]
    tb2 = next(entry for entry in shown if entry["name"] == "glm52_lora_tb2")
    assert tb2["num_nodes"] == 4 and tb2["ranks_per_node"] == 8
    assert tb2["scratch_bytes_per_node"] > 300 * 2**30


def test_an_unknown_recipe_is_told_the_nearest():
    with pytest.raises(SpecError, match=r'found "qwen38_ful"; expected .* Nearest "qwen38_full"'):
        recipe_path("qwen38_ful")


def test_the_page_explains_every_refused_recipe(recipes):
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if re.match(r"\| `.*\| MH", line)]
    explained = {name for row in rows for name in re.findall(r"`([a-z0-9_]+)`", row.split("|")[1])}
    assert explained == {recipe.name for recipe in recipes if recipe.violates}
    for recipe in recipes:
        row = next((row for row in rows if f"`{recipe.name}`" in row), "")
        assert all(rule in row for rule in recipe.violates)
