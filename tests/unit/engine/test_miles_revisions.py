"""The table of flags by revision: what it knows, what it leaves to the checkout itself."""

from miles_hpc.engine.miles import save_trigger
from miles_hpc.engine.miles_command import train_flags
from miles_hpc.engine.miles_revisions import (
    differing_flags,
    is_lacking,
    revision_flags,
    revisions_with,
    unknown_flags,
)
from tests.unit.plan.specs import spec_of

PEAK = "colocate-memory-peak-device"


def test_a_commit_is_known_by_its_beginning_and_whole():
    whole = "57b381de522902967b105a0c2f8c01c870a2b655"
    assert revision_flags("57b381d") == revision_flags(whole) == revision_flags("18bce68cb")
    assert revision_flags("0123456789") is None


def test_no_single_revision_has_every_flag_of_the_full_qwen_recipe():
    assert revisions_with(PEAK) == ("57b381de5",)
    assert revisions_with("drop-checkpoint-page-cache-after-load") == ("e13758d9b",)
    assert {PEAK, "drop-checkpoint-page-cache-after-load"} <= set(differing_flags())


def test_only_what_another_revision_has_is_lacking():
    assert is_lacking("31f1ca961", PEAK)
    assert is_lacking("31f1ca961", f"no-{PEAK}")
    assert not is_lacking("31f1ca961", "tensor-model-parallel-size")
    assert not is_lacking("0123456789", PEAK)


def test_a_checkout_is_asked_for_miles_own_flags_alone():
    flags = frozenset({"colocate", "offload-train"})
    asked = frozenset({"colocate", "no-offload-train", "bf16", PEAK})
    assert unknown_flags(flags, asked) == (PEAK,)


def test_a_revision_that_cannot_be_asked_to_save_is_not_asked():
    old = spec_of({"engine.miles.revision": "e13758d9b", "offload.train": "host"})
    assert save_trigger(old) is None
    assert "--save-trigger-sentinel" not in train_flags(old)
    assert save_trigger(spec_of()) is not None
