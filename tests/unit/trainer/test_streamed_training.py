"""The native engine with its optimizer state on disk: the same training, the same checkpoints' promises."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from miles_hpc.errors import ResumeError
from miles_hpc.trainer.actor import TrainActor
from miles_hpc.trainer.disk_file import DiskOffloadError
from tests.unit.trainer.megatron_lab import (
    make_batch,
    make_model,
    make_spec,
    run_ranks,
    run_updates,
    start_actor,
    start_alone,
    with_old,
)

pytestmark = [pytest.mark.trainer, pytest.mark.timeout(300)]

# Weight decay and a clip that bites, so that a step that forgot one of them would differ.
TRAIN = {"weight_decay": 0.1, "clip_grad": 0.05, "adam_betas": [0.9, 0.95]}


def spec(*, stream: bool, train: str = "none", **tables) -> str:
    streamed = {"stream_optimizer": True, "optimizer_bucket": "48KiB", "chunk": "64KiB"}
    offload = {"train": train, **(streamed if stream else {})}
    return make_spec("qwen3", train=TRAIN, offload=offload, **tables)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model(path, "qwen3")
    return path


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    path = tmp_path / "scratch"
    path.mkdir()
    monkeypatch.setenv("MILES_HPC_SCRATCH", str(path))
    monkeypatch.setenv("MILES_HPC_ATTEMPT_DIR", str(tmp_path / "attempts/1"))
    return path


def batch_of(actor):
    batch = make_batch()
    return with_old(batch, actor.logprobs(batch))


def state_file(scratch: Path) -> bytes:
    (file,) = scratch.rglob("optimizer.bin")
    return file.read_bytes()


def assert_close(left, right) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_allclose(right[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def test_streaming_changes_nothing_of_a_run(folder, scratch):
    results = []
    for stream in (False, True):
        actor = start_actor(spec(stream=stream), folder)
        results.append(run_updates(actor, 5))
        assert len(list(scratch.rglob("optimizer.bin"))) == stream
        assert bool(list(actor.policy.optimizer.state.items())) is not stream
        actor.close()
        assert not list(scratch.rglob("*.bin"))
    plain, streamed = results
    assert_close(plain["adapter"], streamed["adapter"])
    for left, right in zip(plain["reports"], streamed["reports"], strict=True):
        assert left["grad_norm"] > TRAIN["clip_grad"]
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-4)
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-4, abs=1e-7)


def test_every_layout_streams_the_same_training(folder, scratch):
    actor = start_actor(spec(stream=False), folder)
    alone = run_updates(actor, 2)
    actor.close()
    layouts = ({"tp": 2}, {"pp": 2}, {})
    runs = run_ranks(2, [(spec(stream=True, parallel=layout), folder) for layout in layouts])
    for split in runs:
        for name, value in alone["adapter"].items():
            np.testing.assert_allclose(split["adapter"][name], value, atol=2e-6, err_msg=name)
    assert not list(scratch.rglob("*.bin"))


def test_streamed_state_is_no_part_of_an_offload(folder, scratch):
    moved = {}
    for stream in (False, True):
        actor = start_actor(spec(stream=stream, train="disk"), folder)
        batch = batch_of(actor)
        actor.train_step(batch)
        moved[stream] = actor.offload()["bytes"]
        trained = sum(parameter.nbytes for parameter in actor.policy.trainable())
        if stream:
            assert len(list(scratch.rglob("*.bin"))) == 2
        actor.onload()
        assert not actor.train_step(batch)["skipped"]
        actor.close()
        assert not list(scratch.rglob("*.bin"))
    assert moved[False] - moved[True] >= 2 * trained


def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_file(folder, scratch):
    actor = start_actor(spec(stream=True), folder)
    try:
        batch = batch_of(actor)
        actor.train_step(batch)
        before, state = actor.adapter(), state_file(scratch)
        broken = [dataclasses.replace(batch[0], advantage=float("nan")), *batch[1:]]
        assert actor.train_step(broken)["skipped"]
        assert state_file(scratch) == state
        after = actor.adapter()
        assert all(np.array_equal(before[name], after[name]) for name in before)
        assert not actor.train_step(batch)["skipped"]
        assert state_file(scratch) != state
    finally:
        actor.close()


def test_two_and_two_steps_equal_four_to_the_last_digit(folder, scratch, tmp_path):
    actor = start_actor(spec(stream=True), folder)
    batch = batch_of(actor)
    actor.train_step(batch)
    actor.train_step(batch)
    actor.save(str(tmp_path / "step-2"), 2)
    actor.train_step(batch)
    last = actor.train_step(batch)
    whole = actor.adapter()
    actor.close()
    again = start_actor(spec(stream=True), folder)
    try:
        assert again.restore(str(tmp_path / "step-2")) == 2
        again.train_step(batch)
        report = again.train_step(batch)
        assert (report["loss"], report["grad_norm"]) == (last["loss"], last["grad_norm"])
        resumed = again.adapter()
        assert all(np.array_equal(whole[name], resumed[name]) for name in whole)
    finally:
        again.close()


@pytest.mark.parametrize("saved", [True, False])
def test_a_checkpoint_of_the_other_kind_is_refused(folder, scratch, tmp_path, saved):
    actor = start_actor(spec(stream=saved), folder)
    actor.train_step(batch_of(actor))
    actor.save(str(tmp_path / "saved"), 1)
    actor.close()
    other = start_actor(spec(stream=not saved), folder)
    try:
        with pytest.raises(
            ResumeError, match=rf"offload.stream_optimizer = {saved}, now {not saved}.*Restore"
        ):
            other.restore(str(tmp_path / "saved"))
    finally:
        other.close()


def test_a_checkpoint_from_before_the_key_is_one_without_streaming(folder, tmp_path):
    actor = start_actor(spec(stream=False), folder)
    try:
        actor.save(str(tmp_path / "saved"), 1)
        layout = tmp_path / "saved/layout.json"
        written = json.loads(layout.read_text())
        del written["offload.stream_optimizer"]
        layout.write_text(json.dumps(written))
        assert actor.restore(str(tmp_path / "saved")) == 1
    finally:
        actor.close()


def test_state_of_another_topology_or_a_missing_one_is_refused(folder, scratch, tmp_path):
    actor = start_actor(spec(stream=True), folder)
    try:
        actor.train_step(batch_of(actor))
        actor.save(str(tmp_path / "saved"), 1)
        before = actor.adapter()
        manifest = tmp_path / "saved/optimizer-rank00000.json"
        written = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**written, "topology": {"tp": 2, "pp": 1}}))
        with pytest.raises(
            ResumeError,
            match=r"optimizer-rank00000.json: topology was .*'tp': 2.*expected .*'tp': 1.*restore \[parallel\]",
        ):
            actor.restore(str(tmp_path / "saved"))
        manifest.unlink()
        with pytest.raises(ResumeError, match="expected the optimizer state of rank 0"):
            actor.restore(str(tmp_path / "saved"))
        after = actor.adapter()
        assert all(np.array_equal(before[name], after[name]) for name in before)
    finally:
        actor.close()


def test_without_a_scratch_folder_the_load_fails_with_what_to_do(folder, monkeypatch):
    monkeypatch.delenv("MILES_HPC_SCRATCH", raising=False)
    actor = TrainActor(spec(stream=True), 0, 1, str(folder))
    start_alone(actor)
    try:
        with pytest.raises(DiskOffloadError, match="expected the job's scratch folder"):
            actor.load()
    finally:
        actor.close()
