"""The CPU rollout engine against a plain forward pass of transformers, row by row and without padding."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from miles_hpc.paths import RunDir, packaged
from miles_hpc.spec.load import load_spec
from miles_hpc.trainer.demo_model import prepare_model
from miles_hpc.trainer.rollout import AdapterConfig, Prompt, Sampling
from miles_hpc.trainer.rollout_transformers import TransformersEngine, make_engine, sample_tokens

pytestmark = pytest.mark.trainer

CONFIG = AdapterConfig(rank=4, alpha=8.0, target_modules=("q_proj", "v_proj"))
PROMPTS = [
    Prompt(group=0, token_ids=(1, 40, 41, 42, 43, 44, 45, 46, 47, 48)),
    Prompt(group=1, token_ids=(1, 60)),
    Prompt(group=2, token_ids=(70, 71, 72, 73, 74)),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    # Wide initial weights, so that the distributions are far from uniform and a slip shows.
    spec = load_spec(
        packaged("jobs") / "demo_tiny.toml",
        overrides=["model.initializer_range=0.2"],
        local=True,
    ).spec
    return prepare_model(RunDir(tmp_path_factory.mktemp("run")), spec)


@pytest.fixture
def engine(model_dir):
    engine = TransformersEngine(model_dir, "fp32", num_threads=1)
    engine.load()
    yield engine
    engine.close()
    torch.set_grad_enabled(True)


def sampling(**changes):
    values = {
        "samples_per_prompt": 4,
        "max_response_tokens": 12,
        "temperature": 1.0,
        "stop_token_ids": (2,),
        "seed": 7,
        "step": 1,
    }
    return Sampling(**{**values, **changes})


def adapter(seed=0, rank=4):
    """Return an adapter large enough to change the logits of the tiny model visibly."""
    random = np.random.default_rng(seed)
    shapes = {"q_proj": (64, 64), "v_proj": (32, 64)}
    return {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{side}.weight": random.normal(
            0, 0.2, (rank, columns) if side == "A" else (rows, rank)
        ).astype(np.float32)
        for layer in range(4)
        for name, (rows, columns) in shapes.items()
        for side in "AB"
    }


def worst_difference(samples, model, temperature):
    """Return the largest difference of the samples' logprobs from one plain forward pass each."""
    worst = 0.0
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0] / temperature, dim=-1)
        first = len(sample.prompt_ids) - 1
        for place, token in enumerate(sample.response_ids):
            expected = float(logprobs[first + place, token])
            worst = max(worst, abs(expected - sample.rollout_logprobs[place]))
    return worst


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logprobs_are_those_of_the_sampled_distribution_in_spite_of_padding(
    engine, model_dir, temperature
):
    samples = engine.generate(PROMPTS, sampling(temperature=temperature))
    plain = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True)
    assert len(samples) == 12
    assert worst_difference(samples, plain, temperature) < 2e-5


def test_samples_come_in_the_order_of_prompts_and_draws(engine):
    samples = engine.generate(PROMPTS, sampling())
    assert [sample.group for sample in samples] == [0] * 4 + [1] * 4 + [2] * 4
    assert all(sample.prompt_ids == PROMPTS[sample.group].token_ids for sample in samples)
    assert len({sample.response_ids for sample in samples}) == 12


def test_what_is_sampled_does_not_depend_on_how_prompts_are_batched(engine):
    together = engine.generate(PROMPTS, sampling())
    alone = [sample for prompt in PROMPTS for sample in engine.generate([prompt], sampling())]
    assert [s.response_ids for s in together] == [s.response_ids for s in alone]


def test_another_step_draws_other_samples_and_the_same_step_the_same(engine):
    first = [s.response_ids for s in engine.generate(PROMPTS, sampling())]
    assert [s.response_ids for s in engine.generate(PROMPTS, sampling())] == first
    assert [s.response_ids for s in engine.generate(PROMPTS, sampling(step=2))] != first


def test_a_response_ends_with_its_stop_token_or_at_the_limit(engine):
    # 96 of 512 tokens stop, so that both ends are seen.
    stops = tuple(range(0, 512, 5))
    samples = engine.generate(PROMPTS, sampling(stop_token_ids=stops, samples_per_prompt=16))
    finished = [sample for sample in samples if sample.finished]
    assert 0 < len(finished) < len(samples)
    for sample in samples:
        assert len(sample.response_ids) == len(sample.rollout_logprobs)
        assert not set(sample.response_ids[:-1]) & set(stops)
        assert (sample.response_ids[-1] in stops) == sample.finished
        assert sample.finished or len(sample.response_ids) == 12


def test_rows_that_stopped_do_not_change_those_that_go_on(engine, model_dir):
    stops = tuple(range(0, 512, 5))
    samples = engine.generate(PROMPTS, sampling(stop_token_ids=stops, samples_per_prompt=16))
    plain = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True)
    assert worst_difference(samples, plain, 1.0) < 2e-5


def test_no_prompts_give_no_samples(engine):
    assert engine.generate([], sampling()) == []


def test_an_adapter_acts_as_peft_applies_it(engine, model_dir):
    peft = pytest.importorskip("peft")
    engine.load_adapter(adapter(), CONFIG, 3)
    assert engine.version() == 3
    samples = engine.generate(PROMPTS, sampling())
    base = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True)
    settings = peft.LoraConfig(r=4, lora_alpha=8.0, target_modules=["q_proj", "v_proj"])
    reference = peft.get_peft_model(base, settings)
    tensors = {name: torch.from_numpy(array) for name, array in adapter().items()}
    result = peft.set_peft_model_state_dict(reference, tensors)
    assert not result.unexpected_keys
    assert worst_difference(samples, reference.eval(), 1.0) < 2e-5
    plain = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True)
    assert worst_difference(samples, plain, 1.0) > 1e-2


def test_a_second_adapter_replaces_the_first(engine):
    engine.load_adapter(adapter(seed=1), CONFIG, 1)
    expected = [s.rollout_logprobs for s in engine.generate(PROMPTS, sampling())]
    engine.load_adapter(adapter(seed=2), CONFIG, 2)
    assert [s.rollout_logprobs for s in engine.generate(PROMPTS, sampling())] != expected
    engine.load_adapter(adapter(seed=1), CONFIG, 3)
    assert [s.rollout_logprobs for s in engine.generate(PROMPTS, sampling())] == expected


def test_sleep_and_wake_change_nothing_that_is_sampled(engine):
    engine.load_adapter(adapter(), CONFIG, 1)
    expected = engine.generate(PROMPTS, sampling())
    report = engine.sleep()
    assert report["bytes"] >= 0
    engine.wake()
    assert engine.generate(PROMPTS, sampling()) == expected


def test_bf16_weights_are_bf16(model_dir):
    spec = load_spec(
        packaged("jobs") / "demo_tiny.toml", overrides=["model.initializer_range=0.2"], local=True
    ).spec
    engine = make_engine(spec.model_dump_json(), str(model_dir), "bf16")
    report = engine.load()
    samples = engine.generate(PROMPTS, sampling())
    torch.set_grad_enabled(True)
    plain = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True)
    total = sum(parameter.numel() for parameter in plain.parameters())
    assert report["bytes"] == 2 * total
    assert 1e-4 < worst_difference(samples, plain, 1.0) < 1.0


def test_tokens_are_drawn_with_the_probabilities_of_the_softmax():
    logits = torch.tensor([[2.0, 0.0, 1.0, -4.0]])
    count = 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, logprobs = sample_tokens(logits.expand(count, -1), uniforms, 2.0)
    expected = torch.softmax(logits[0] / 2.0, dim=-1)
    found = torch.bincount(tokens, minlength=4) / count
    assert torch.allclose(found, expected, atol=1e-4)
    assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53])
def test_the_ends_of_the_draw_never_give_an_impossible_token(uniform):
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]])
    token, logprob = sample_tokens(logits, torch.tensor([uniform], dtype=torch.float64), 1.0)
    assert int(token) in (1, 2)
    assert float(logprob) == pytest.approx(math.log(0.5))
