"""What `plan` prints fits a terminal of 100 columns, whatever the job."""

import shlex
from dataclasses import replace

import pytest

from miles_hpc.engine.compose import draft_plan
from miles_hpc.launch.describe import describe_plan
from miles_hpc.plan.plan import EnvVar
from miles_hpc.spec.load import load_spec
from tests.fakes.recipes import RECIPES


def plan_of(recipe, *overrides):
    draft = draft_plan(
        load_spec(recipe, overrides=overrides).spec,
        python="/opt/envs/of/a/team/with/a/long/name/bin/python3.11",
        package_version="0",
    )
    return draft.plan


def too_wide(text):
    return [line for line in text.splitlines() if len(line) > 100]


@pytest.mark.parametrize("recipe", RECIPES, ids=[path.stem for path in RECIPES])
def test_the_plan_of_every_recipe_fits_100_columns(recipe):
    plan = plan_of(recipe)
    if plan is None:  # an impossible layout has nothing to print but its refusal
        return
    text = describe_plan(plan, placement=True)
    assert not too_wide(text)
    bars = [line for line in text.splitlines() if line.count("[") > 0 and "GPU" not in line]
    assert any("#" in line for line in bars), "the memory bars are there"


def test_a_value_wider_than_the_terminal_is_folded_and_whole():
    plan = plan_of(RECIPES[0])
    value = "".join(f"{number:03}," for number in range(200))
    variable = EnvVar(name="LONG", value=value, why="w" * 300, source="s")
    plan = replace(plan, environment=(variable,), driver_argv=("python", "-m", value, "--x", "y z"))
    text = describe_plan(plan)
    assert not too_wide(text)
    assert text.replace("\n" + " " * 6, "").count(value) == 2


def test_a_command_over_several_lines_is_one_command_for_a_shell():
    words = ("python", *(f"--flag-{number}" for number in range(60)), "two words")
    text = describe_plan(replace(plan_of(RECIPES[0]), driver_argv=words))
    command = text.partition("\ndriver\n")[2].partition("\n\n")[0]
    assert tuple(shlex.split(command.replace("\\\n", " "))) == words
    assert command.count("\\\n") > 3
