"""What Miles' switches change of a plan's memory: weights rebuilt from the optimizer, an optimizer that is on the host."""

from miles_hpc.engine.compose import memory_of
from miles_hpc.spec.load import load_spec
from tests.fakes.recipes import ROOT

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
