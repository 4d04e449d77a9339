"""Saves and restores what a trainer rank changes: adapter, optimizer state, step and random state.

The base is not saved: it is the checkpoint that the spec names. Each model-parallel rank of the first replica writes one
file; `FOLDER.tmp` becomes `FOLDER` once all files are on disk. The COMPLETE marker is the driver's.

megatron's dist_checkpointing is not used: its distributed optimizer cannot be loaded without Transformer Engine, and
adapters are small enough not to need resharding. Knows no offload; the tensors must be in memory.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from miles_hpc.errors import DriverError, ResumeError
from miles_hpc.plan.resumable import STREAMED, state_layout
from miles_hpc.spec.job import JobSpec
from miles_hpc.trainer.disk_file import DiskOffloadError
from miles_hpc.trainer.grid import Grid

LAYOUT, ADAPTER = "layout.json", "adapter_model.safetensors"


def _rank_file(folder: Path, grid: Grid) -> Path:
    return folder / f"trainer-tp{grid.tp_rank:03d}-pp{grid.pp_rank:03d}.pt"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _agree(grid: Grid, message: str | None) -> None:
    """Raise on every rank when any rank has an error to tell; without one, a barrier."""
    messages: list[str | None] = [None] * grid.world_size
    dist.all_gather_object(messages, message, group=grid.control)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(messages) if text is not None]
    if failed:
        raise DriverError("; ".join(failed))


def _attempt(action: Callable[[], None], folder: Path) -> str | None:
    try:
        action()
    except OSError as error:
        return f"{folder}: {error}; expected a writable folder with space. Check the run folder's disk."
    except DiskOffloadError as error:
        return str(error)
    return None


def save_checkpoint(
    folder: Path,
    state: dict[str, object],
    adapter: dict[str, Tensor] | None,
    spec: JobSpec,
    grid: Grid,
    *,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write `folder` together with all ranks; it has its name only when every file is on disk.

    Args:
        folder: the final name, on a disk that every rank sees.
        state: this rank's state, of tensors and plain values.
        adapter: the whole adapter under its PEFT names, on rank 0.
        spec: gives the layout that a restore will demand.
        grid: the ranks that write together.
        write_more: writes this rank's own files, to the device, into the folder it is given.

    Raises:
        DriverError: on every rank, if any rank could not write; `folder` does not exist then.
    """
    unfinished = folder.with_name(f"{folder.name}.tmp")

    def prepare() -> None:
        if grid.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)

    def write() -> None:
        if grid.dp_rank == 0:
            torch.save(state, _rank_file(unfinished, grid))
            _sync(_rank_file(unfinished, grid))
        if write_more is not None:
            write_more(unfinished)
        if adapter is not None:
            save_file(adapter, str(unfinished / ADAPTER), metadata={"format": "pt"})
            _sync(unfinished / ADAPTER)
            text = json.dumps(state_layout(spec), indent=2) + "\n"
            (unfinished / LAYOUT).write_text(text, encoding="utf-8")
            _sync(unfinished / LAYOUT)

    def publish() -> None:
        if grid.rank == 0:
            _sync(unfinished)
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
            _sync(folder.parent)

    for action in (prepare, write, publish):
        _agree(grid, _attempt(action, folder))


def _owned(value: object) -> object:
    """Return `value` with every tensor copied: torch.load's own memory cannot be freed while offloaded."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _owned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_owned(item) for item in value)
    return value


def load_checkpoint(folder: Path, spec: JobSpec, grid: Grid) -> dict[str, Any]:
    """Return this rank's state from `folder`, on the CPU.

    Raises:
        ResumeError: if the checkpoint is missing, unreadable, or was written for another model or layout.
    """
    try:
        # A checkpoint written before the key existed holds an optimizer state that was not streamed.
        saved = {STREAMED: False} | json.loads((folder / LAYOUT).read_text(encoding="utf-8"))
        differences = [
            f"{key} = {saved.get(key)!r}, now {value!r}"
            for key, value in state_layout(spec).items()
            if saved.get(key) != value
        ]
        if differences:
            raise ResumeError(
                f"{folder}: written with {'; '.join(differences)}; expected the same model and layout. "
                "Restore those values, or start a new run (dp may change, tp and pp may not)."
            )
        state: dict[str, Any] = torch.load(
            _rank_file(folder, grid), map_location="cpu", weights_only=True
        )
    except (OSError, ValueError, RuntimeError, EOFError, UnpicklingError) as error:
        raise ResumeError(
            f"{folder}: {error}; expected {LAYOUT} and {_rank_file(folder, grid).name} from a complete checkpoint. "
            "Remove this folder to continue from an older one."
        ) from error
    return {key: _owned(value) for key, value in state.items()}


def copy_parameters(saved: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Copy saved adapter shards into the parameters, in order."""
    with torch.no_grad():
        for value, parameter in zip(saved, parameters, strict=True):
            parameter.copy_(value)
