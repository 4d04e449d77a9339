import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from miles_hpc.trainer.rollout import AdapterConfig
from miles_hpc.trainer.saves import (
    COMPLETE,
    begin_save,
    complete_save,
    export_adapter,
    find_saved,
    prune_saves,
    remove_unfinished,
)


def save(checkpoints, step, text="x"):
    folder = begin_save(checkpoints, step)
    (folder / "trainer").mkdir()
    (folder / "trainer" / "rank0.pt").write_text(text)
    complete_save(folder, step)
    return folder


def test_complete_checkpoints_are_found_in_the_order_of_their_steps(tmp_path):
    for step in (10, 2, 9):
        save(tmp_path, step)
    assert [saved.step for saved in find_saved(tmp_path)] == [2, 9, 10]


def test_a_folder_without_the_marker_does_not_exist(tmp_path):
    save(tmp_path, 1)
    begin_save(tmp_path, 2)
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-3.tmp").mkdir()
    (tmp_path / "step-3.tmp" / COMPLETE).touch()
    assert [saved.step for saved in find_saved(tmp_path)] == [1]


def test_no_checkpoints_folder_means_no_checkpoints(tmp_path):
    assert find_saved(tmp_path / "absent") == ()


def test_an_interrupted_save_leaves_nothing_in_the_next_one(tmp_path):
    folder = begin_save(tmp_path, 4)
    (folder / "stale").touch()
    assert list(begin_save(tmp_path, 4).iterdir()) == []


def test_saving_a_complete_step_again_makes_it_incomplete_first(tmp_path):
    save(tmp_path, 4)
    begin_save(tmp_path, 4)
    assert find_saved(tmp_path) == ()


def test_the_marker_tells_step_and_bytes(tmp_path):
    folder = save(tmp_path, 7, text="12345")
    assert json.loads((folder / COMPLETE).read_text()) == {"step": 7, "bytes": 5}
    assert not (folder / f".{COMPLETE}").exists()


def test_pruning_keeps_the_newest_and_leaves_unfinished_folders_alone(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    unfinished = begin_save(tmp_path, 5)
    assert prune_saves(tmp_path, keep=2) == (1, 2)
    assert [saved.step for saved in find_saved(tmp_path)] == [3, 4]
    assert unfinished.is_dir()
    assert prune_saves(tmp_path, keep=2) == ()


@pytest.fixture
def synced(monkeypatch):
    """Return a list that gets the path of every fsync, with what stood below the folder of the checkpoint then."""
    calls = []
    real = os.fsync

    def record(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        folder = path if path.name.startswith("step-") else path.parent
        calls.append((path.name, sorted(entry.name for entry in folder.rglob("*"))))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return calls


def test_the_marker_appears_only_when_everything_else_is_on_the_disk(tmp_path, synced):
    save(tmp_path, 3)
    names = [name for name, _ in synced]
    assert names == ["rank0.pt", "trainer", ".COMPLETE", "step-3", tmp_path.name]
    assert [COMPLETE in below for _, below in synced] == [False, False, False, True, True]


def test_the_marker_is_gone_from_the_disk_before_any_file_of_a_removed_checkpoint_is(
    tmp_path, synced
):
    for step in (1, 2):
        save(tmp_path, step)
    synced.clear()
    prune_saves(tmp_path, keep=1)
    begin_save(tmp_path, 2)
    assert synced == [("step-1", ["rank0.pt", "trainer"]), ("step-2", ["rank0.pt", "trainer"])]


def test_what_interrupted_saves_and_removals_left_is_removed_later(tmp_path):
    save(tmp_path, 1)
    begin_save(tmp_path, 2)
    half_marked = save(tmp_path, 3)
    (half_marked / COMPLETE).rename(half_marked / f".{COMPLETE}")
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-9").write_text("a file")
    assert remove_unfinished(tmp_path) == (2, 3)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-1", "step-9", "step-x"]
    assert remove_unfinished(tmp_path / "absent") == ()


@pytest.mark.parametrize("transposed", [False, True])
def test_an_exported_adapter_holds_the_same_numbers_in_any_memory_layout(tmp_path, transposed):
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = tensor.T if transposed else tensor
    config = AdapterConfig(rank=2, alpha=4.0, target_modules=("q_proj",))
    export_adapter(tmp_path / "peft", {"a.lora_A.weight": tensor}, config, "base")
    loaded = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert np.array_equal(loaded["a.lora_A.weight"], tensor)
    values = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (values["r"], values["lora_alpha"], values["target_modules"]) == (2, 4.0, ["q_proj"])
