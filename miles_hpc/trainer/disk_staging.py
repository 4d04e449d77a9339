"""The staging memory between tensors and a file, and the workers that move blocks through it.

Two chunks of memory in all, cut into slots; one worker owns one slot and carries one block at a time: device copy, then
disk request, or the reverse. While one worker copies, the others' requests are in flight, so that copies cost nothing
that the disk does not already cost. Knows nothing of what the bytes mean.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from miles_hpc.trainer.disk_file import DiskFile, DiskOffloadError
from miles_hpc.trainer.disk_layout import ALIGNMENT_BYTES, StreamLayout, round_up
from miles_hpc.trainer.pinned import PinnedMemory

REQUESTS_IN_FLIGHT = 8
"""Slots, and so requests in flight at most; measured, docs/measurements/offload.md."""


class Staging:
    """Two chunks of page-aligned host memory, pinned when a GPU is at the other end, kept until `close`.

    Args:
        chunk_bytes: half of the memory to take.
        device: where the tensors live; a CUDA device makes the memory pinned and gives each slot a stream.
        slots: requests in flight at most; fewer when a slot would fall below one aligned page.
    """

    def __init__(
        self, chunk_bytes: int, device: torch.device, *, slots: int = REQUESTS_IN_FLIGHT
    ) -> None:
        total = 2 * chunk_bytes
        if chunk_bytes < ALIGNMENT_BYTES:
            raise DiskOffloadError(
                f"staging: found a chunk of {chunk_bytes} bytes, expected at least {ALIGNMENT_BYTES}. "
                "Set offload.chunk to 16MiB or more."
            )
        slots = max(1, min(slots, total // ALIGNMENT_BYTES))
        self.block_bytes = total // slots // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.device = device
        self.num_bytes = self.block_bytes * slots
        self.memory = PinnedMemory(self.num_bytes, device, purpose="offload staging")
        self.slots = tuple(Slot(self, index) for index in range(slots))

    def close(self) -> None:
        """Give the memory back; a second call does nothing."""
        self.slots = ()
        self.memory.close()


class Slot:
    """One worker's part of the staging memory."""

    def __init__(self, staging: Staging, index: int) -> None:
        self._memory, self._device = staging.memory, staging.device
        self._start = index * staging.block_bytes
        self.tensor = self._memory.tensor.narrow(0, self._start, staging.block_bytes)
        self.stream = _stream_of(staging.device)

    def memory(self, num_bytes: int) -> memoryview:
        """Return the first `num_bytes` for a disk request."""
        return self._memory.view(self._start, num_bytes)

    @contextlib.contextmanager
    def copying(self, ready: "torch.cuda.Event | None") -> Iterator[None]:
        """Run copies on this slot's stream, after `ready`; they are complete at exit."""
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self.stream):
            if ready is not None:
                self.stream.wait_event(ready)
            yield
            self.stream.synchronize()


def write_spans(
    spans: Sequence[torch.Tensor],
    layout: StreamLayout,
    file: DiskFile,
    staging: Staging,
    *,
    at: int = 0,
) -> None:
    """Write flat uint8 tensors to `file` as `layout` says, from the aligned offset `at`; the space must be reserved.

    Every byte is on the device or queued for it when this returns; `file.finish_writes` makes sure of it.

    Raises:
        DiskOffloadError: after all requests in flight have ended; the spans are untouched.
    """
    ready = _work_queued_so_far(staging.device)

    def write(slot: Slot, block: int) -> None:
        payload = layout.payload_bytes(block)
        length = round_up(payload)
        with slot.copying(ready):
            for piece in layout.pieces(block):
                source = spans[piece.span].narrow(0, piece.span_offset_bytes, piece.num_bytes)
                target = slot.tensor.narrow(0, piece.block_offset_bytes, piece.num_bytes)
                target.copy_(source, non_blocking=True)
        if length > payload:
            slot.tensor[payload:length].zero_()
        file.write_block(slot.memory(length), at + block * layout.block_bytes)

    run_workers(write, layout.num_blocks, staging)


def read_spans(
    spans: Sequence[torch.Tensor],
    layout: StreamLayout,
    file: DiskFile,
    staging: Staging,
    *,
    at: int = 0,
) -> None:
    """Fill flat uint8 tensors from `file` as `layout` says, from offset `at`; every byte is in place when this returns.

    Raises:
        DiskOffloadError: after all requests in flight have ended; the spans then hold nothing of value.
    """
    ready = _work_queued_so_far(staging.device)

    def read(slot: Slot, block: int) -> None:
        length = round_up(layout.payload_bytes(block))
        file.read_block(slot.memory(length), at + block * layout.block_bytes)
        with slot.copying(ready):
            for piece in layout.pieces(block):
                source = slot.tensor.narrow(0, piece.block_offset_bytes, piece.num_bytes)
                target = spans[piece.span].narrow(0, piece.span_offset_bytes, piece.num_bytes)
                target.copy_(source, non_blocking=True)

    run_workers(read, layout.num_blocks, staging)


def run_workers(carry: Callable[[Slot, int], None], num_blocks: int, staging: Staging) -> None:
    """Carry every block once, as many at a time as there are slots; the first error stops the rest and is raised."""
    blocks = itertools.count()
    take = threading.Lock()
    failed = threading.Event()

    def work(slot: Slot) -> None:
        while not failed.is_set():
            with take:
                block = next(blocks)
            if block >= num_blocks:
                return
            try:
                carry(slot, block)
            except BaseException:
                failed.set()
                raise

    slots = staging.slots[:num_blocks]
    if not slots:
        return
    with ThreadPoolExecutor(len(slots), thread_name_prefix="disk-offload") as pool:
        futures = [pool.submit(work, slot) for slot in slots]
    for future in futures:
        future.result()


def _stream_of(device: torch.device) -> "torch.cuda.Stream | None":
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _work_queued_so_far(device: torch.device) -> "torch.cuda.Event | None":
    """Mark the caller's stream, so that copies on other streams see what was computed before the call."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
