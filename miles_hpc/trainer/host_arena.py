"""Move a set of tensors to host memory and back at the speed of the bus: one arena, pinned once and kept.

Pinning memory costs far more than a copy into it (measured, docs/measurements/offload.md), so the arena stays between moves
and is taken anew only when more is needed. The same storages, memory policies and guarantees as `disk_offload`.
"""

import time
from collections.abc import Iterable

import torch

from miles_hpc.trainer.disk_file import DiskOffloadError
from miles_hpc.trainer.disk_layout import ALIGNMENT_BYTES, StreamLayout, round_up
from miles_hpc.trainer.disk_offload import (
    Memory,
    Moved,
    ResizedStorages,
    as_bytes,
    distinct_storages,
)
from miles_hpc.trainer.pinned import PinnedMemory


class HostArena:
    """The host copy of one rank's tensors.

    Args:
        device: where the tensors live.
        memory: how their memory is given back; resizing by default.
    """

    def __init__(self, *, device: torch.device, memory: Memory | None = None) -> None:
        self._device = device
        self._memory: Memory = ResizedStorages() if memory is None else memory
        self._arena: PinnedMemory | None = None
        self._out: tuple[tuple[torch.UntypedStorage, ...], StreamLayout] | None = None

    @property
    def is_out(self) -> bool:
        """The tensors are in the arena and their own memory is free."""
        return self._out is not None

    @property
    def held_bytes(self) -> int:
        """Host memory held, in use or not."""
        return 0 if self._arena is None else self._arena.num_bytes

    def offload(self, tensors: Iterable[torch.Tensor]) -> Moved:
        """Copy the storages of `tensors` into the arena, then free their memory.

        Raises:
            DiskOffloadError: with nothing freed, if the host has not that much memory.
        """
        if self._out is not None:
            raise DiskOffloadError("host arena: tensors are already out; expected an onload first.")
        started = time.perf_counter()
        storages = distinct_storages(tensors, self._device)
        layout = StreamLayout.of([storage.size() for storage in storages], ALIGNMENT_BYTES)
        arena = self._reserve(round_up(layout.total_bytes)).tensor
        for storage, start in zip(storages, layout.starts[:-1], strict=True):
            arena.narrow(0, start, storage.size()).copy_(as_bytes(storage), non_blocking=True)
        self._wait()
        self._memory.release(storages)
        self._out = (storages, layout)
        return Moved(
            num_bytes=layout.total_bytes, seconds=time.perf_counter() - started, direct=None
        )

    def onload(self) -> Moved:
        """Take the tensors' memory again and copy every byte back; may be called again after a failure."""
        if self._out is None or self._arena is None:
            raise DiskOffloadError("host arena: nothing is out; expected an offload before onload.")
        started = time.perf_counter()
        storages, layout = self._out
        self._memory.restore(storages, layout.span_bytes)
        arena = self._arena.tensor
        for storage, start in zip(storages, layout.starts[:-1], strict=True):
            as_bytes(storage).copy_(arena.narrow(0, start, storage.size()), non_blocking=True)
        self._wait()
        self._out = None
        return Moved(
            num_bytes=layout.total_bytes, seconds=time.perf_counter() - started, direct=None
        )

    def close(self) -> None:
        """Give the arena back; bytes that are out are lost."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        self._out = None

    def _reserve(self, num_bytes: int) -> PinnedMemory:
        wanted = max(num_bytes, ALIGNMENT_BYTES)
        if self._arena is None or self._arena.num_bytes < wanted:
            if self._arena is not None:
                self._arena.close()
                self._arena = None
            self._arena = PinnedMemory(wanted, self._device, purpose="host arena")
        return self._arena

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
