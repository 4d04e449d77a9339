"""Every packaged job and site profile loads, alone and together, and the recipes say what their sources say."""

from pathlib import Path

import pytest
import tomli

from miles_hpc.paths import packaged
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.load import load_spec

JOBS = sorted(packaged("jobs").glob("*.toml"))
SITES = sorted((packaged("env") / "sites").glob("*.toml"))


def test_there_are_jobs_and_sites():
    assert {path.stem for path in JOBS} >= {
        "demo",
        "demo_tiny",
        "qwen38_full",
        "qwen38_4layer",
        "glm52_lora_tb2",
    }
    assert len(SITES) >= 2


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_job_loads_and_its_dump_is_the_same_spec(path: Path):
    spec = load_spec(path).spec
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize("site", SITES, ids=lambda path: path.stem)
@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_job_loads_with_every_site(path: Path, site: Path):
    loaded = load_spec(path, site=site.stem)
    assert (
        loaded.spec.cluster.partition
        == tomli.loads(site.read_text(encoding="utf-8"))["cluster"]["partition"]
    )


@pytest.mark.parametrize("path", [*JOBS], ids=lambda path: path.stem)
def test_a_job_names_the_schema_on_its_first_line(path: Path):
    directive = path.read_text(encoding="utf-8").splitlines()[0].split(" ")
    assert directive[0] == "#:schema"
    assert (path.parent / directive[1]).is_file()


def test_qwen38_full_is_the_recipe_of_16_nodes_of_gb300():
    spec = load_spec(packaged("jobs") / "qwen38_full.toml").spec
    assert (spec.cluster.num_nodes, spec.cluster.gpus_per_node) == (16, 4)
    assert (spec.parallel.tp, spec.parallel.pp, spec.parallel.ep, spec.parallel.etp) == (
        1,
        4,
        16,
        1,
    )
    assert spec.rollout.gpus_per_engine == 16
    assert spec.lora is not None
    assert (spec.lora.rank, spec.lora.alpha) == (32, 64.0)
    assert spec.lora.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert (spec.rollout.prompts_per_step, spec.rollout.samples_per_prompt) == (32, 8)
    assert spec.train.max_tokens_per_gpu == 2048
    assert (spec.offload.train, spec.offload.peak_device, spec.offload.base_cpu_backup) == (
        "host",
        "gpu",
        True,
    )
    assert spec.checkpoint.save_interval is not None
    experts = (
        spec.model.num_layers
        * (spec.model.num_experts or 0)
        * 3
        * 8192
        * (spec.model.moe_ffn_hidden_size or 0)
    )
    assert experts == 2_370_821_947_392


def test_qwen38_4layer_is_the_full_recipe_on_one_node():
    full, small = (
        load_spec(packaged("jobs") / f"qwen38_{name}.toml").spec for name in ("full", "4layer")
    )
    assert (small.cluster.num_nodes, small.cluster.gpus_per_node, small.model.num_layers) == (
        1,
        8,
        4,
    )
    assert (small.parallel.pp, small.parallel.ep, small.rollout.gpus_per_engine) == (1, 8, 8)
    assert small.env == full.env
    assert small.model.hidden_size == full.model.hidden_size


def test_glm52_is_the_recipe_of_4_nodes_of_h200():
    spec = load_spec(packaged("jobs") / "glm52_lora_tb2.toml").spec
    assert (spec.cluster.num_nodes, spec.cluster.gpus_per_node) == (4, 8)
    assert (spec.parallel.tp, spec.parallel.ep, spec.rollout.gpus_per_engine) == (8, 32, 16)
    assert spec.lora is not None
    assert (spec.lora.rank, spec.lora.alpha, len(spec.lora.target_modules)) == (16, 32.0, 8)
    assert (spec.offload.train, spec.offload.scratch_root) == ("disk", Path("/scratch"))
    assert (spec.rollout.prompts_per_step, spec.rollout.samples_per_prompt) == (4, 8)
    # One in four layers from the third on computes the top-k: 1, 2, 3, 7, 11, ... 75 counted from one.
    assert spec.model.dsa_topk_layers == tuple(
        layer - 1 for layer in range(1, 79) if max(layer - 3, 0) % 4 == 0
    )
