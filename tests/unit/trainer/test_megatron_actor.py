"""One trainer rank against transformers and PEFT, and what it must leave untouched."""

import dataclasses
import importlib
import json

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from miles_hpc.errors import PlanError, ResumeError
from miles_hpc.trainer import cpu_megatron
from miles_hpc.trainer.actor import TrainActor
from miles_hpc.trainer.weights import export_base
from tests.unit.trainer.megatron_lab import (
    FAMILIES,
    largest_gap,
    make_batch,
    make_model,
    make_spec,
    plain_logprobs,
    start_actor,
    start_alone,
    with_old,
)

pytestmark = pytest.mark.trainer


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    path = tmp_path_factory.mktemp(family)
    make_model(path, family)
    return path


@pytest.fixture
def actor(family, folder):
    rank = start_actor(make_spec(family), folder)
    yield rank
    rank.close()


def test_logprobs_are_those_of_transformers_in_the_same_process(actor, folder):
    # The model is loaded after the CPU shim was installed.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    frequencies = model.model.rotary_emb.inv_freq
    expected = 1 / 10000 ** (torch.arange(0, 16, 2).float() / 16)
    torch.testing.assert_close(frequencies, expected)
    batch = make_batch()
    assert largest_gap(actor.logprobs(batch), plain_logprobs(model, batch)) < 1e-4


def test_temperature_divides_the_logits(family, folder):
    rank = start_actor(make_spec(family, rollout={"temperature": 0.7}), folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    batch = make_batch()
    try:
        assert largest_gap(rank.logprobs(batch), plain_logprobs(model, batch, 0.7)) < 1e-4
    finally:
        rank.close()


def test_the_shim_changes_megatron_modules_alone(actor):
    assert cpu_megatron.install() == ()
    for name in ("zeros", "empty", "tensor"):
        assert type(getattr(torch, name)).__name__ == "builtin_function_or_method"
    changed = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    untouched = importlib.import_module("megatron.core.models.gpt.gpt_model")
    assert changed.torch is not torch
    assert changed.torch.zeros(1, device="cuda").device.type == "cpu"
    assert untouched.torch is torch
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_export_is_bit_equal_to_the_checkpoint(actor, folder):
    exported = dict(export_base(actor.policy.model, actor.spec.model, actor.grid))
    stored = load_file(folder / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], value) for name, value in stored.items())


def test_a_trained_adapter_means_the_same_to_peft(actor, folder):
    batch = make_batch()
    batch = with_old(batch, actor.logprobs(batch))
    for _ in range(3):
        actor.train_step(batch)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lora = actor.spec.lora
    peft = get_peft_model(
        model,
        LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.target_modules)),
    ).eval()
    state = {name: torch.from_numpy(value) for name, value in actor.adapter().items()}
    assert not set_peft_model_state_dict(peft, state).unexpected_keys
    adapted = actor.logprobs(batch)
    assert largest_gap(adapted, plain_logprobs(peft, batch)) < 1e-4
    assert largest_gap(adapted, [sample.old_logprobs for sample in batch]) > 1e-2


def test_the_base_has_no_gradient_and_stays_as_it_was(actor):
    model = actor.policy.model
    base = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    batch = make_batch()
    actor.train_step(with_old(batch, actor.logprobs(batch)))
    trainable = sum(p.numel() for p in actor.policy.trainable())
    assert sum(b.grad_data.numel() for b in actor.policy.ddp.buffers) < trainable + 1024
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            assert not hasattr(parameter, "main_grad"), name
            assert torch.equal(parameter, base[name]), name


def test_a_gradient_that_is_not_finite_changes_nothing(actor):
    batch = make_batch()
    batch = with_old(batch, actor.logprobs(batch))
    actor.train_step(batch)
    before = actor.adapter()
    state = json.dumps(actor.policy.optimizer.state_dict(), default=lambda t: t.tolist())
    broken = [dataclasses.replace(batch[0], advantage=float("nan")), *batch[1:]]
    report = actor.train_step(broken)
    assert report["skipped"]
    assert report["grad_norm"] is None
    assert report["loss"] is None
    json.dumps(report, allow_nan=False)
    after = actor.adapter()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert state == json.dumps(actor.policy.optimizer.state_dict(), default=lambda t: t.tolist())
    assert not actor.train_step(batch)["skipped"]


def test_kl_to_the_base_is_zero_before_and_positive_after_an_update(family, folder):
    rank = start_actor(make_spec(family, train={"kl_coef": 0.1}), folder)
    try:
        batch = make_batch()
        batch = with_old(batch, rank.logprobs(batch))
        assert rank.train_step(batch)["kl"] == pytest.approx(0, abs=1e-9)
        assert rank.train_step(batch)["kl"] > 1e-5
    finally:
        rank.close()


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_gradient(family, folder, recompute):
    norms = []
    for choice in ("none", recompute):
        rank = start_actor(make_spec(family, train={"recompute": choice}), folder)
        batch = make_batch()
        batch = with_old(batch, rank.logprobs(batch))
        norms.append([rank.train_step(batch)["grad_norm"] for _ in range(2)])
        rank.close()
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_two_and_two_steps_equal_four_to_the_last_digit(actor, family, folder, tmp_path):
    batch = make_batch()
    batch = with_old(batch, actor.logprobs(batch))
    actor.train_step(batch)
    actor.train_step(batch)
    actor.save(str(tmp_path / "step-2"), 2)
    assert not (tmp_path / "step-2.tmp").exists()
    actor.train_step(batch)
    last = actor.train_step(batch)
    whole = actor.adapter()
    actor.close()
    again = start_actor(make_spec(family), folder)
    try:
        assert again.restore(str(tmp_path / "step-2")) == 2
        again.train_step(batch)
        report = again.train_step(batch)
        assert (report["loss"], report["grad_norm"]) == (last["loss"], last["grad_norm"])
        resumed = again.adapter()
        assert all(np.array_equal(whole[name], resumed[name]) for name in whole)
    finally:
        again.close()


def test_a_checkpoint_of_another_layout_is_refused(actor, tmp_path):
    actor.save(str(tmp_path / "saved"), 1)
    layout = tmp_path / "saved/layout.json"
    layout.write_text(json.dumps({**json.loads(layout.read_text()), "pp": 2}))
    with pytest.raises(ResumeError, match="pp = 2, now 1"):
        actor.restore(str(tmp_path / "saved"))
    with pytest.raises(ResumeError, match="nowhere"):
        actor.restore(str(tmp_path / "nowhere"))
    rank_file = next((tmp_path / "saved").glob("trainer-*.pt"))
    rank_file.write_bytes(rank_file.read_bytes()[:100])
    layout.write_text(json.dumps({**json.loads(layout.read_text()), "pp": 1}))
    with pytest.raises(ResumeError, match="complete checkpoint"):
        actor.restore(str(tmp_path / "saved"))


def test_training_goes_on_bit_for_bit_after_a_night_on_disk(family, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MILES_HPC_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("MILES_HPC_ATTEMPT_DIR", str(tmp_path / "attempts/1"))
    (tmp_path / "scratch").mkdir()
    adapters = []
    for train in ("none", "disk"):
        rank = start_actor(make_spec(family, offload={"train": train}), folder)
        batch = make_batch()
        batch = with_old(batch, rank.logprobs(batch))
        for _ in range(3):
            moved = rank.offload()
            if train == "disk":
                assert moved["bytes"] > sum(p.nbytes for p in rank.policy.trainable())
                assert all(
                    p.untyped_storage().nbytes() == 0 for p in rank.policy.model.parameters()
                )
            rank.onload()
            rank.train_step(batch)
        adapters.append(rank.adapter())
        rank.close()
    assert all(np.array_equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert not list((tmp_path / "scratch").rglob("*.bin"))


def test_a_checkpoint_that_does_not_fit_the_table_is_refused(family, folder):
    cases = (
        ({"ffn_hidden_size": 256}, r"shape \[128, 64\].*\[256, 64\]"),
        ({"num_layers": 5}, "no tensor model.layers.4"),
        ({"num_layers": 3}, "no place in a"),
        ({"attention_bias": True}, "model.attention_bias"),
    )
    for model, message in cases:
        rank = TrainActor(make_spec(family, model=model), 0, 1, str(folder))
        start_alone(rank)
        try:
            with pytest.raises(PlanError, match=message):
                rank.load()
        finally:
            rank.close()
