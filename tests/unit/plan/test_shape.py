"""Parameter counts against published totals, and their split over ranks."""

from pathlib import Path

import pytest

from miles_hpc.paths import packaged
from miles_hpc.plan.shape import count_adapters, count_layer, count_params, count_stages
from miles_hpc.spec.load import load_spec
from tests.unit.plan.specs import GLM52, NATIVE, QWEN38, spec_of


def recipe(name):
    return load_spec(Path(packaged("jobs")) / name).spec


def test_smollm2_has_exactly_the_parameters_of_its_checkpoint():
    """134,515,008: the sum of the tensors in SmolLM2-135M's safetensors file."""
    params = count_params(recipe("demo.toml").model)
    assert (params.total, params.unlisted) == (134_515_008, 0)


def test_qwen38_routed_experts_are_exact():
    """92 * 512 * 3 * 8192 * 2048."""
    assert count_params(spec_of(QWEN38).model).routed == 2_370_821_947_392


def test_glm52_leaves_ten_billion_to_the_published_total():
    """75 * 256 * 3 * 6144 * 2048 routed; the rest of 753e9 that no shape key gives is indexers and one more layer."""
    params = count_params(spec_of(GLM52).model)
    assert params.routed == 724_775_731_200
    assert params.total == 753_000_000_000
    assert 9e9 < params.unlisted < 11e9


def test_stages_hold_every_parameter_once_without_other_axes():
    spec = spec_of(model__num_layers=8, parallel__pp=4, model__tie_word_embeddings=False)
    stages = count_stages(spec)
    final_norm = spec.model.hidden_size
    assert sum(stage.others for stage in stages) == count_params(spec.model).total - final_norm
    assert [stage.layers for stage in stages] == [2, 2, 2, 2]


def test_tied_embeddings_are_held_by_both_ends_of_a_pipeline():
    one = count_stages(spec_of(model__tie_word_embeddings=True))
    two = count_stages(spec_of(model__tie_word_embeddings=True, parallel__pp=2))
    embedding = 32000 * 1024
    assert sum(stage.others for stage in two) - one[0].others == embedding


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (8, 1), (4, 2)])
def test_routed_experts_are_split_over_expert_ranks_and_nothing_else_is(ep, etp):
    spec = spec_of(GLM52, {"parallel.ep": ep, "parallel.etp": etp, "parallel.tp": 1})
    whole = count_stages(spec_of(GLM52, {"parallel.ep": 1, "parallel.tp": 1}))[0]
    stage = count_stages(spec)[0]
    assert stage.routed == whole.routed // (ep * etp)
    assert stage.others == whole.others


def test_latent_attention_replicates_its_down_projections():
    layer = count_layer(spec_of(GLM52).model, 0)
    assert layer.replicated == 6144 * (2048 + 512 + 64) + 2 * 6144
    assert layer.routed == 0
    assert count_layer(spec_of(GLM52).model, 3).routed == 256 * 3 * 6144 * 2048


def test_adapters_are_rank_times_inputs_plus_outputs():
    spec = spec_of(NATIVE, model__num_layers=2, lora__target_modules=["q_proj", "down_proj"])
    per_layer = (1024 + 64 * 64) + (4096 + 1024)
    assert count_adapters(spec) == 2 * 8 * per_layer
    assert count_adapters(spec_of()) == 0


def test_linear_mixers_carry_no_attention_adapter():
    """23 of 92 layers have full attention; the fullest of four stages has 6 of them."""
    spec = spec_of(QWEN38, {"lora.target_modules": ["q_proj"]})
    assert count_adapters(spec) == 6 * 32 * (8192 + 64 * 256)
