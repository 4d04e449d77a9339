"""The sbatch options and the script, for every recipe and for hostile values."""

import dataclasses
import shlex

import pytest

from miles_hpc.errors import SpecError, SubmitError
from miles_hpc.handoff import node_argv
from miles_hpc.launch.bundle import make_handoff
from miles_hpc.launch.sbatch import render_sbatch, sbatch_options, srun_arguments
from miles_hpc.paths import RunDir
from miles_hpc.spec.job import JobSpec
from tests.fakes.recipes import PYTHON, RECIPES, ROOT, load_recipe

GOLDEN = ROOT / "tests" / "golden"


def with_cluster(spec: JobSpec, **changes) -> JobSpec:
    """Return `spec` with other values in [cluster], as if validated."""
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update=changes)})


def rendered(spec, plan, root):
    run = RunDir(root)
    return render_sbatch(spec, run, make_handoff(spec, plan, run, cluster="slurm"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_renders_its_golden_files(recipe, update_golden):
    loaded, plan = load_recipe(recipe)
    run = RunDir(ROOT / "runs" / "golden")
    handoff = dataclasses.replace(
        make_handoff(loaded.spec, plan, run, cluster="slurm"),
        python=str(loaded.spec.cluster.python or PYTHON),
    )
    texts = {
        "job.sbatch": render_sbatch(loaded.spec, run, handoff),
        "handoff.json": handoff.to_json(),
    }
    for name, text in texts.items():
        golden = GOLDEN / recipe.stem / name
        normal = text.replace(str(ROOT), "/checkout")
        if update_golden:
            golden.parent.mkdir(parents=True, exist_ok=True)
            golden.write_text(normal)
        assert golden.is_file(), f"{golden} is missing: pytest --update-golden"
        assert normal == golden.read_text()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_script_is_options_and_one_srun_without_logic(recipe):
    loaded, plan = load_recipe(recipe)
    first, *rest = rendered(loaded.spec, plan, ROOT / "x").splitlines()
    assert first == "#!/bin/bash"
    commands = [line for line in rest if line and not line.startswith("#SBATCH --")]
    assert len(commands) == 1
    words = shlex.split(commands[0])
    handoff = make_handoff(loaded.spec, plan, RunDir(ROOT / "x"), cluster="slurm")
    assert words[0] == "srun"
    assert tuple(words[-len(node_argv(handoff)) :]) == node_argv(handoff)
    assert "--export=ALL" in words


def test_time_memory_and_counts_are_spelled_without_ambiguity(tmp_path, demo):
    spec = with_cluster(demo("job.time_limit='30'")[0].spec, memory_per_node=1_500_000_000)
    options = sbatch_options(spec, RunDir(tmp_path))
    assert options["time"] == "0-00:30:00"
    assert options["mem"] == "1431M"
    assert options["nodes"] == "2"
    assert options["ntasks-per-node"] == "1"


def test_all_memory_is_asked_for_when_none_is_named(tmp_path, demo):
    spec = with_cluster(demo()[0].spec, memory_per_node=None, cpus_per_node=None)
    options = sbatch_options(spec, RunDir(tmp_path))
    assert options["mem"] == "0"
    assert "cpus-per-task" not in options
    assert "--mem=0" in srun_arguments(spec)
    assert not any(argument.startswith("--cpus-per-task") for argument in srun_arguments(spec))


@pytest.mark.parametrize(
    ("request_form", "kind", "expected"),
    [
        ("gres", None, {"gres": "gpu:8"}),
        ("gres", "h200", {"gres": "gpu:h200:8"}),
        ("gpus-per-node", None, {"gpus-per-node": "8"}),
        ("gpus-per-node", "h200", {"gpus-per-node": "h200:8"}),
        ("none", "h200", {}),
    ],
)
def test_gpus_are_asked_for_in_the_form_of_the_site(tmp_path, demo, request_form, kind, expected):
    spec = with_cluster(demo()[0].spec, gpus_per_node=8, gpu_request=request_form, gpu_type=kind)
    options = sbatch_options(spec, RunDir(tmp_path))
    assert {
        name: options[name] for name in ("gres", "gpus-per-node") if name in options
    } == expected


def test_resume_decides_whether_slurm_may_requeue(tmp_path, demo):
    assert sbatch_options(demo()[0].spec, RunDir(tmp_path))["requeue"] is True
    never = sbatch_options(demo("job.resume=never")[0].spec, RunDir(tmp_path))
    assert never["no-requeue"] is True
    assert "requeue" not in never


def test_everything_a_site_adds_becomes_an_option(tmp_path, demo):
    spec = with_cluster(
        demo()[0].spec,
        partition="main",
        account="acct",
        qos="high",
        constraint="ib&h200",
        reservation="res",
        segment=2,
        exclusive=True,
        sbatch_options={"licenses": "scratch:1", "contiguous": True, "hold": False},
        srun_options=("--container-image=a b.sqsh",),
    )
    text = rendered(spec, demo()[1], tmp_path)
    for line in (
        "#SBATCH --partition=main",
        "#SBATCH --account=acct",
        "#SBATCH --qos=high",
        "#SBATCH --constraint='ib&h200'",
        "#SBATCH --reservation=res",
        "#SBATCH --segment=2",
        "#SBATCH --exclusive",
        "#SBATCH --licenses=scratch:1",
        "#SBATCH --contiguous",
    ):
        assert line in text.splitlines()
    assert "--hold" not in text
    assert "'--container-image=a b.sqsh'" in text


@pytest.mark.parametrize(
    "name", ["nodes", "output", "export", "signal", "array", "wrap", "parsable"]
)
def test_an_option_that_this_package_owns_is_refused(tmp_path, demo, name):
    spec = with_cluster(demo()[0].spec, sbatch_options={name: "x"})
    with pytest.raises(SpecError, match=name):
        sbatch_options(spec, RunDir(tmp_path))


@pytest.mark.parametrize(
    "name", ["--licenses", "li censes", "licenses=a", "", "licenses\n#SBATCH --wrap"]
)
def test_an_option_name_that_is_none_is_refused(tmp_path, demo, name):
    spec = with_cluster(demo()[0].spec, sbatch_options={name: "x"})
    with pytest.raises(SpecError, match="long option"):
        sbatch_options(spec, RunDir(tmp_path))


def test_a_value_cannot_begin_a_new_line_of_the_script(tmp_path, demo):
    spec = demo()[0].spec
    bad = "x\nrm -rf ~"
    for changed in (
        with_cluster(spec, account=bad),
        with_cluster(spec, sbatch_options={"licenses": bad}),
        with_cluster(spec, srun_options=(bad,)),
        spec.model_copy(update={"job": spec.job.model_copy(update={"comment": bad})}),
    ):
        with pytest.raises(SpecError, match="line breaks"):
            rendered(changed, demo()[1], tmp_path)


def test_a_path_with_quotes_and_spaces_comes_back_from_the_shell(tmp_path, demo):
    loaded, plan = demo()
    root = tmp_path / 'a b\'s $HOME "x" #1, é `id` ; -rf'
    words = shlex.split(rendered(loaded.spec, plan, root).splitlines()[-1])
    assert words[-1] == str(root)
    assert f"PYTHONPATH={root}/code" in words


@pytest.mark.parametrize("character", ["\n", "\r", "\t", "%", "\\", ":", "\x7f"])
def test_a_path_that_slurm_would_read_differently_is_refused(tmp_path, demo, character):
    loaded, plan = demo()
    with pytest.raises(SubmitError, match="found the character"):
        rendered(loaded.spec, plan, tmp_path / f"a{character}b")
