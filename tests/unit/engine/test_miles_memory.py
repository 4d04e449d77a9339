"""What Miles' switches change of a plan's memory: weights rebuilt from the optimizer, an optimizer that is on the host."""

import pytest

from miles_hpc.engine.compose import find, memory_of
from miles_hpc.plan.findings import errors_of
from miles_hpc.spec.load import load_spec
from tests.fakes.recipes import ROOT
from tests.unit.plan.specs import GLM52_FULL, spec_of

_REBUILD = "engine.miles.extra_args.rematerialize-param-from-master-weight=false"


def memory(recipe, *overrides):
    return memory_of(load_spec(ROOT / "jobs" / f"{recipe}.toml", overrides=overrides).spec)


def test_weights_that_are_rebuilt_need_no_pinned_copy_and_no_backup():
    rebuilt, pinned = memory("glm52_16x4"), memory("glm52_16x4", _REBUILD)
    saved = {
        phase.name: other.committed_host_bytes - phase.committed_host_bytes
        for phase, other in zip(rebuilt.phases, pinned.phases, strict=True)
    }
    copy = pinned.phase("train").parts["host.pinned_trainer_copy"]
    assert "host.pinned_trainer_copy" not in rebuilt.phase("train").parts
    assert set(saved.values()) == {copy}
    backups = [plan.phase("rollout").parts["host.trainer_backup"] for plan in (rebuilt, pinned)]
    assert backups[0] == backups[1]


def test_an_optimizer_on_the_host_is_saved_from_there():
    there = memory("deepseek_v4_flash_8x4")
    assert "host.checkpoint_staging" not in there.phase("save").parts
    assert there.phase("save").parts["host.optimizer"] > 400 * 2**30
    on_device = memory("deepseek_v4_flash_8x4", "train.optimizer_cpu_offload=false")
    staged = on_device.phase("save").parts["host.checkpoint_staging"]
    assert staged == there.phase("save").parts["host.optimizer"]


def test_streamed_state_is_written_in_place_and_leaves_the_gpu_and_the_save():
    """Source: radixark/miles 31f1ca961 miles_plugins/optimizers/nvme_stream.py, docs/models/thinkingmachines/inkling.md."""
    whole, streamed = memory("inkling_16x4"), memory("inkling_16x4_streamed")
    state = whole.phase("train").parts["gpu.optimizer"]
    assert whole.gpu_peak.gpu_bytes_per_gpu > whole.limits.gpu_bytes_per_gpu
    assert streamed.gpu_peak.gpu_bytes_per_gpu < streamed.limits.gpu_bytes_per_gpu
    parts = streamed.phase("train").parts
    assert parts["scratch.optimizer"] == pytest.approx(4 * state)
    assert parts["gpu.optimizer_bucket"] == 200_000_000 * 12
    assert parts["host.staging"] == 4 * 2 * 256 * 2**20
    assert "host.checkpoint_staging" not in streamed.phase("save").parts


def test_bf16_moments_take_a_third_less_of_the_disk():
    flag = "engine.miles.extra_args.stream-optimizer-state-moment-dtype=bf16"
    plans = [memory("inkling_16x4_streamed", *more) for more in ((), (flag,))]
    fp32, bf16 = (plan.phase("train").parts["scratch.optimizer"] for plan in plans)
    assert bf16 * 3 == fp32 * 2


def test_glm52_streams_about_a_terabyte_of_state_a_node():
    """openenv/glm52_tbench2: 279 GB a rank, four ranks a node, streamed since a GPU has 276.6 GB."""
    spec = spec_of(
        {**GLM52_FULL, "offload.stream_optimizer": True, "train.max_tokens_per_gpu": 16384}
    )
    parts = memory_of(spec).phase("train").parts
    assert parts["scratch.optimizer"] == pytest.approx(4 * 279e9, rel=0.1)
    assert "gpu.optimizer" not in parts


def test_an_optimizer_that_passes_a_gpu_in_host_memory_makes_inkling_small_fit():
    """docs/models/thinkingmachines/inkling-small.md: validated on 4 x 8 H200 with the optimizer in host memory."""
    assert not errors_of(find(load_spec(ROOT / "jobs" / "inkling_small.toml").spec))
    there = memory("inkling_small", "train.optimizer_cpu_offload=false")
    assert there.gpu_peak.gpu_bytes_per_gpu > there.limits.gpu_bytes_per_gpu
