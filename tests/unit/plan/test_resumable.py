"""What a saved state is tied to, and what of a spec may change before a run goes on."""

import pytest

from miles_hpc.plan.resumable import broken_ties, legal_change, state_layout
from tests.fakes.recipes import ROOT, load_recipe

STREAMED = "offload.stream_optimizer=true"


def spec(*overrides):
    return load_recipe(ROOT / "jobs" / "demo.toml", *overrides)[0].spec


@pytest.mark.parametrize(
    "change",
    [
        "train.num_steps=9",
        "job.max_attempts=9",
        "job.time_limit=2h",
        "train.learning_rate=0.1",
        "cluster.partition=long",
    ],
)
def test_what_the_state_does_not_hold_may_change(change):
    assert broken_ties(spec(), spec(change)) == ()
    assert broken_ties(spec(STREAMED), spec(STREAMED, change)) == ()


def test_the_native_state_is_tied_to_tp_and_pp_and_not_to_dp():
    assert broken_ties(spec(), spec("cluster.num_nodes=4")) == ()
    (broken,) = broken_ties(spec(), spec("parallel.pp=1"))
    assert broken == "parallel.pp = 2 when it was saved, now 1"
    assert "tp = 1 and pp = 2 on any multiple of 2 ranks" in legal_change(spec())


def test_a_streamed_state_is_tied_to_its_ranks_and_buckets():
    saved = spec(STREAMED)
    more = broken_ties(saved, spec(STREAMED, "cluster.num_nodes=4"))
    assert more == ("world size = 2 when it was saved, now 4",)
    buckets = broken_ties(saved, spec(STREAMED, "offload.optimizer_bucket=128MiB"))
    assert [text.partition(" = ")[0] for text in buckets] == ["offload.optimizer_bucket"]
    assert "the same topology alone: tp = 1, pp = 2" in legal_change(saved)
    both = broken_ties(saved, spec())
    assert "offload.stream_optimizer = True when it was saved, now False" in both


def test_another_adapter_or_model_is_another_state():
    assert broken_ties(spec(), spec("lora.rank=2"))
    assert state_layout(spec())["lora_rank"] == state_layout(spec("train.num_steps=9"))["lora_rank"]
