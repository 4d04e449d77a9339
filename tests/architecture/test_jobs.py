"""Every recipe in jobs/ and every profile in env/sites/ is checked and planned, says how to run it, and has its source."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from miles_hpc.spec.load import load_spec
from tests.architecture.sources import ROOT, project_files
from tests.architecture.test_cli_frozen import COMMANDS
from tests.fakes.recipes import RECIPES

JOBS = [path for path in project_files() if path.parent == ROOT / "jobs"]
KINDS = [job for job in JOBS if job in RECIPES]
SITES = [path for path in project_files() if path.parent == ROOT / "env" / "sites"]


def miles_hpc(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "miles_hpc", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_there_are_recipes_and_profiles():
    assert {path.stem for path in JOBS} >= {
        "demo",
        "demo_tiny",
        "glm52_lora_tb2",
        "qwen38_4layer",
        "qwen38_full",
    }
    assert SITES


@pytest.mark.parametrize("job", KINDS, ids=lambda path: path.stem)
def test_a_recipe_is_good_and_its_plan_fills_the_cluster(job):
    checked = miles_hpc("check", str(job))
    assert checked.returncode == 0, checked.stderr
    plan = json.loads(miles_hpc("plan", str(job), "--json").stdout)
    layout = plan["layout"]
    assert layout["tp"] * layout["pp"] * layout["cp"] * layout["dp"] == layout["world_size"]
    assert {"num_engines", "gpus_per_engine", "nodes_per_engine"} <= set(plan["rollout"])
    assert all(entry["why"] and entry["source"] for entry in plan["environment"])


def test_a_recipe_of_a_launcher_that_cannot_work_is_refused_with_its_plan():
    planned = miles_hpc("plan", "jobs/glm52_16x8.toml", "--json")
    assert planned.returncode == 3
    findings = json.loads(planned.stdout)["findings"]
    assert {entry["id"] for entry in findings if entry["level"] == "error"} == {"MH202", "MH203"}


def commands_of(job: Path) -> list[list[str]]:
    """Return the arguments of each `miles-hpc` command that the recipe's comments show."""
    shown = re.findall(r"^# miles-hpc (.*)$", job.read_text(encoding="utf-8"), re.M)
    return [shlex.split(line) for line in shown]


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.stem)
def test_a_recipe_names_its_schema_its_source_and_the_command_that_runs_it(job):
    text = job.read_text(encoding="utf-8")
    schema = text.splitlines()[0].removeprefix("#:schema ")
    assert (job.parent / schema).resolve().is_file()
    commands = commands_of(job)
    assert commands
    for verb, *arguments in commands:
        assert verb in COMMANDS
        assert f"jobs/{job.name}" in arguments
        site = arguments[arguments.index("--site") + 1] if "--site" in arguments else None
        spec = load_spec(job, site=site, local="local" in arguments).spec
        assert spec.model.shape_source


def test_every_profile_is_used_by_a_recipe():
    used = {word for job in JOBS for command in commands_of(job) for word in command}
    assert {path.stem for path in SITES} <= used
