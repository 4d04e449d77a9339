"""The checkpoint folders of a run: which are complete, how one becomes complete, and which are removed.

A folder `checkpoints/step-N` without COMPLETE does not exist for anyone. Knows nothing of what trainer ranks write into it.
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from miles_hpc.trainer.rollout import AdapterConfig, PeftState

COMPLETE = "COMPLETE"
_NAME = re.compile(r"step-([0-9]+)")


@dataclass(frozen=True, slots=True)
class SavedStep:
    """One complete checkpoint; `step` is the number of steps that were done when it was written."""

    step: int
    folder: Path


def find_saved(checkpoints: Path) -> tuple[SavedStep, ...]:
    """Return the complete checkpoints, oldest first."""
    found = [
        SavedStep(int(match[1]), entry)
        for entry in checkpoints.glob("step-*")
        if (match := _NAME.fullmatch(entry.name)) and (entry / COMPLETE).is_file()
    ]
    return tuple(sorted(found, key=lambda saved: saved.step))


def begin_save(checkpoints: Path, step: int) -> Path:
    """Return an empty folder for `step`; what an interrupted save or an abandoned attempt left there is removed."""
    folder = checkpoints / f"step-{step}"
    _remove(folder)
    folder.mkdir(parents=True)
    return folder


def complete_save(folder: Path, step: int) -> int:
    """Make the folder count: sync every file and folder, then put COMPLETE there by a rename; return its bytes."""
    size_bytes = 0
    for path in sorted(folder.rglob("*"), reverse=True):
        _sync(path)
        size_bytes += path.stat().st_size if path.is_file() else 0
    partial = folder / f".{COMPLETE}"
    partial.write_text(json.dumps({"step": step, "bytes": size_bytes}) + "\n", encoding="utf-8")
    _sync(partial)
    partial.rename(folder / COMPLETE)
    _sync(folder)
    _sync(folder.parent)
    return size_bytes


def prune_saves(checkpoints: Path, keep: int) -> tuple[int, ...]:
    """Remove all but the newest `keep` complete checkpoints and return the removed steps.

    The marker goes first, so that an interruption leaves an incomplete folder and never a half-removed complete one.
    """
    removed = find_saved(checkpoints)[:-keep]
    for saved in removed:
        _remove(saved.folder)
    return tuple(saved.step for saved in removed)


def remove_unfinished(checkpoints: Path) -> tuple[int, ...]:
    """Remove the folders that an interrupted save or removal left, and return their steps; only while nothing saves."""
    complete = {saved.folder for saved in find_saved(checkpoints)}
    found = {
        int(match[1]): entry
        for entry in checkpoints.glob("step-*")
        if (match := _NAME.fullmatch(entry.name)) and entry not in complete and entry.is_dir()
    }
    for folder in found.values():
        _remove(folder)
    return tuple(sorted(found))


def _remove(folder: Path) -> None:
    """Remove a checkpoint; its marker is gone from the disk before any of its files is."""
    marker = folder / COMPLETE
    if marker.exists():
        marker.unlink()
        _sync(folder)
    shutil.rmtree(folder, ignore_errors=True)


def export_adapter(folder: Path, state: PeftState, config: AdapterConfig, base: str) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained` loads.

    Args:
        folder: made if it is not there.
        state: the whole adapter under its PEFT names.
        config: its shape.
        base: name or folder of the base model, noted in adapter_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    values = {**config.to_peft(), "base_model_name_or_path": base}
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
