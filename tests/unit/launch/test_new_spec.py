"""`miles-hpc init`: a small spec that checks clean, nothing overwritten, nothing left behind."""

import io
import subprocess
import sys

import pytest

from miles_hpc.engine.compose import find
from miles_hpc.errors import PlanError, SpecError, SubmitError
from miles_hpc.launch.catalogue import read_recipe, recipe_paths
from miles_hpc.launch.new_spec import choose_recipe, write_new_spec
from miles_hpc.plan.findings import errors_of
from miles_hpc.spec.load import load_spec
from tests.fakes.recipes import CATALOGUE

SOUND = [path.stem for path in CATALOGUE if not read_recipe(path).violates]


@pytest.mark.parametrize("recipe", SOUND)
def test_the_new_spec_is_the_recipe_under_its_own_name(recipe, tmp_path):
    output = tmp_path / "mine.toml"
    write_new_spec(recipe, output, site=None, replace=False)
    spec = load_spec(output).spec
    assert spec.job.name == "mine"
    assert spec.model == load_spec(recipe_paths()[0].with_stem(recipe)).spec.model
    assert errors_of(find(spec)) == ()
    assert len(output.read_text().splitlines()) < 20
    assert list(tmp_path.iterdir()) == [output]


def test_what_is_most_often_changed_can_be_uncommented(tmp_path):
    output = tmp_path / "mine.toml"
    write_new_spec("qwen3_4b", output, site=None, replace=False)
    text = output.read_text()
    head, _, tail = text.partition("recipe's values:\n")
    # A dotted key of a table that is open belongs above it.
    lines = [line.removeprefix("# ") for line in tail.splitlines()]
    output.write_text("\n".join([*lines, head]).replace("num_steps = 3000", "num_steps = 7"))
    assert load_spec(output).spec.train.num_steps == 7


def test_a_file_is_overwritten_only_when_forced(tmp_path):
    output = tmp_path / "mine.toml"
    output.write_text("precious")
    with pytest.raises(SpecError, match=r"found a file; expected a name that is free.*--force"):
        write_new_spec("demo", output, site=None, replace=False)
    assert output.read_text() == "precious"
    write_new_spec("demo", output, site=None, replace=True)
    assert 'extends = "recipe:demo"' in output.read_text()


def test_a_refused_recipe_leaves_no_file(tmp_path):
    with pytest.raises(PlanError, match="MH202"):
        write_new_spec("glm52_16x8", tmp_path / "mine.toml", site=None, replace=False)
    assert list(tmp_path.iterdir()) == []


def test_a_site_is_checked_and_named(tmp_path):
    output = tmp_path / "mine.toml"
    write_new_spec("qwen38_full", output, site="example-gb300", replace=False)
    assert "# miles-hpc submit mine.toml --site example-gb300" in output.read_text()
    with pytest.raises(SpecError, match="example-gb301"):
        write_new_spec("qwen38_full", tmp_path / "b.toml", site="example-gb301", replace=False)
    assert list(tmp_path.iterdir()) == [output]


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(SubmitError, match="No such file or directory"):
        write_new_spec("demo", tmp_path / "no" / "mine.toml", site=None, replace=False)


def test_a_file_name_that_is_no_job_name_keeps_the_recipes(tmp_path):
    output = tmp_path / "my job.toml"
    write_new_spec("demo", output, site=None, replace=False)
    assert load_spec(output).spec.job.name == "demo"


@pytest.mark.parametrize("answer", ["7\n", f"{CATALOGUE[6].stem}\n", " 7 \n"])
def test_a_terminal_is_asked_by_number_or_name(answer):
    asked = io.StringIO()
    assert choose_recipe(asked, io.StringIO(answer)) == CATALOGUE[6].stem
    assert f"  7  {CATALOGUE[6].stem}\n" in asked.getvalue()


@pytest.mark.parametrize("answer", ["", "0\n", "999\n", "\u00b2\n", "nothing\n"])
def test_another_answer_is_refused(answer):
    with pytest.raises(SpecError, match="expected one of the"):
        choose_recipe(io.StringIO(), io.StringIO(answer))


def test_without_a_terminal_the_recipe_is_an_argument(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "miles_hpc", "init", "-o", str(tmp_path / "mine.toml")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: recipe: found none; expected one of the ")
