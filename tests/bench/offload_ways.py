"""The ways of moving a rank's tensors to a file (or to host memory) and back that tests/bench/offload.py compares.

Each way is built with its tensors in place, then `out` (durable: fsynced where there is a file, memory given back), `drop`
(page cache emptied, not timed) and `back` (the tensors are on the device again). `tensors` is what came back.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from miles_hpc.filesystem import resident_bytes
from miles_hpc.node.page_cache import drop_page_cache, regular_files
from miles_hpc.trainer.disk_offload import DiskOffload, SaverRegion
from miles_hpc.trainer.host_arena import HostArena
from miles_hpc.trainer.pinned import PinnedMemory

MIB = 1 << 20
MILES_CHUNK_BYTES = 256 * MIB
"""Staging of torch_memory_saver's disk backend as Miles sets it by default."""


def saver() -> Any:
    """Return torch_memory_saver, hooked into torch's pools (no LD_PRELOAD needed)."""
    from torch_memory_saver import torch_memory_saver

    if torch_memory_saver._impl is None:
        torch_memory_saver.hook_mode = "torch"
    return torch_memory_saver


class Way:
    """What all ways share: a folder of this rank, and tensors copied from `base`."""

    durable = True
    disk = True
    in_region: ClassVar[dict[str, Any] | None] = None

    def __init__(self, folder: Path, base: list[torch.Tensor], chunk_bytes: int) -> None:
        self.folder, self.chunk_bytes = folder, chunk_bytes
        self.device = base[0].device
        if self.in_region is None:
            self.tensors = [tensor.clone() for tensor in base]
        else:
            with saver().region(tag=f"bench-{type(self).__name__}", **self.in_region):
                self.tensors = [tensor.clone() for tensor in base]
        self.shapes = [tensor.shape for tensor in self.tensors]
        self.baseline = resident()
        self.prepare()

    def prepare(self) -> None:
        """Anything that a running job does once."""

    def free(self) -> None:
        self.tensors = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def drop(self) -> None:
        drop_page_cache([self.folder])

    def cached_bytes(self) -> int:
        return sum(resident_bytes(path) for path in regular_files([self.folder]))

    def close(self) -> None:
        self.free()
        for path in self.folder.iterdir():
            path.unlink()


class Ours(Way):
    options: ClassVar[dict[str, Any]] = {}

    def prepare(self) -> None:
        self.offload = DiskOffload(
            self.folder / "tensors.bin",
            device=self.device,
            chunk_bytes=self.chunk_bytes,
            **self.options,
        )

    def out(self) -> None:
        self.offload.offload(self.tensors)

    def back(self) -> None:
        self.offload.onload()

    def close(self) -> None:
        self.offload.close()
        super().close()


class OursBuffered(Ours):
    options: ClassVar[dict[str, Any]] = {"mode": "buffered"}


class OursChecksums(Ours):
    options: ClassVar[dict[str, Any]] = {"checksums": True}


class OursSaverRegion(Ours):
    in_region: ClassVar[dict[str, Any] | None] = {}

    def prepare(self) -> None:
        region = SaverRegion(saver(), f"bench-{type(self).__name__}")
        self.offload = DiskOffload(
            self.folder / "tensors.bin",
            device=self.device,
            chunk_bytes=self.chunk_bytes,
            memory=region,
        )


class SaverDisk(Way):
    """torch_memory_saver's own disk backend, with Miles' chunk."""

    in_region: ClassVar[dict[str, Any] | None] = {"enable_disk_backup": True}

    def prepare(self) -> None:
        saver().set_disk_backup_dir(str(self.folder))

    def out(self) -> None:
        saver().pause(f"bench-{type(self).__name__}")

    def back(self) -> None:
        saver().resume(f"bench-{type(self).__name__}")

    def close(self) -> None:
        self.free()  # its files go with the memory they stood for
        for path in self.folder.iterdir():
            path.unlink()


class SaverPinned(SaverDisk):
    disk = durable = False
    in_region: ClassVar[dict[str, Any] | None] = {"enable_cpu_backup": True}


class TorchSave(Way):
    def out(self) -> None:
        with (self.folder / "tensors.pt").open("wb") as file:
            torch.save(self.tensors, file)
            file.flush()
            os.fsync(file.fileno())
        self.free()

    def back(self) -> None:
        self.tensors = torch.load(self.folder / "tensors.pt", map_location=self.device)


class SafeTensors(Way):
    def out(self) -> None:
        from safetensors.torch import save_file

        path = self.folder / "tensors.safetensors"
        save_file({f"{i:04d}": tensor for i, tensor in enumerate(self.tensors)}, path)
        fsync(path)
        self.free()

    def back(self) -> None:
        from safetensors.torch import load_file

        loaded = load_file(self.folder / "tensors.safetensors", device=str(self.device))
        # On CPU it maps the file: the copy is what makes the tensors usable without the disk.
        copy = self.device.type == "cpu"
        self.tensors = [loaded[name].clone() if copy else loaded[name] for name in sorted(loaded)]


class Memmap(Way):
    def out(self) -> None:
        total = sum(tensor.numel() for tensor in self.tensors)
        target = np.memmap(self.folder / "tensors.mm", dtype=np.uint8, mode="w+", shape=(total,))
        at = 0
        for tensor in self.tensors:
            target[at : at + tensor.numel()] = tensor.cpu().numpy()
            at += tensor.numel()
        target.flush()
        fsync(self.folder / "tensors.mm")
        del target
        self.free()

    def back(self) -> None:
        source = np.memmap(self.folder / "tensors.mm", dtype=np.uint8, mode="r")
        at, self.tensors = 0, []
        for shape in self.shapes:
            part = torch.from_numpy(np.array(source[at : at + shape.numel()]))
            self.tensors.append(part.to(self.device))
            at += shape.numel()


class PlainBuffered(Way):
    """write() of each tensor and one fsync: what a first attempt looks like."""

    def out(self) -> None:
        with (self.folder / "tensors.raw").open("wb", buffering=0) as file:
            for tensor in self.tensors:
                write_all(file.fileno(), memoryview(tensor.cpu().numpy()))
            os.fsync(file.fileno())
        self.free()

    def back(self) -> None:
        self.tensors = []
        with (self.folder / "tensors.raw").open("rb", buffering=0) as file:
            for shape in self.shapes:
                tensor = torch.empty(shape, dtype=torch.uint8)
                read_all(file.fileno(), memoryview(tensor.numpy()))
                self.tensors.append(tensor.to(self.device))


class MilesRecipe(Way):
    """As Miles has it: a file for each allocation, one pinned buffer, copy then write, fsync and DONTNEED per file."""

    def prepare(self) -> None:
        self.staging = torch.empty(
            MILES_CHUNK_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda"
        )
        self.files: list[int] = []

    def out(self) -> None:
        for index, tensor in enumerate(self.tensors):
            path = self.folder / f"tms_{index:06d}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if tensor.numel():
                os.posix_fallocate(fd, 0, tensor.numel())
            for at in range(0, tensor.numel(), MILES_CHUNK_BYTES):
                part = tensor[at : at + MILES_CHUNK_BYTES]
                staged = self.staging[: part.numel()]
                staged.copy_(part)
                write_all(fd, memoryview(staged.numpy()))
            self._settle(fd)
            self.files.append(fd)
        self.free()

    def back(self) -> None:
        self.tensors = []
        for fd, shape in zip(self.files, self.shapes, strict=True):
            tensor = torch.empty(shape, dtype=torch.uint8, device=self.device)
            os.lseek(fd, 0, os.SEEK_SET)
            for at in range(0, tensor.numel(), MILES_CHUNK_BYTES):
                part = tensor[at : at + MILES_CHUNK_BYTES]
                staged = self.staging[: part.numel()]
                read_all(fd, memoryview(staged.numpy()))
                part.copy_(staged)
            self._settle(fd)
            self.tensors.append(tensor)

    @staticmethod
    def _settle(fd: int) -> None:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for fd in self.files:
            os.close(fd)
        del self.staging
        super().close()


class KvikIo(Way):
    """NVIDIA's kvikio; without GPUDirect Storage it reads and writes through threads of its own."""

    def prepare(self) -> None:
        import kvikio
        import kvikio.defaults

        kvikio.defaults.set({"num_threads": 8, "task_size": self.chunk_bytes // 4})
        self.file = self.folder / "tensors.kvikio"

    def out(self) -> None:
        import kvikio

        with kvikio.CuFile(self.file, "w") as file:
            at, futures = 0, []
            for tensor in self.tensors:
                futures.append(file.pwrite(_array(tensor), file_offset=at))
                at += -(-tensor.numel() // 4096) * 4096
            for future in futures:
                future.get()
        fsync(self.file)
        self.free()

    def back(self) -> None:
        import kvikio

        self.tensors = [
            torch.empty(shape, dtype=torch.uint8, device=self.device) for shape in self.shapes
        ]
        with kvikio.CuFile(self.file, "r") as file:
            at, futures = 0, []
            for tensor in self.tensors:
                futures.append(file.pread(_array(tensor), file_offset=at))
                at += -(-tensor.numel() // 4096) * 4096
            for future in futures:
                future.get()


class Arena(Way):
    """Our host target."""

    disk = durable = False

    def prepare(self) -> None:
        self.arena = HostArena(device=self.device)
        self.arena.offload(self.tensors)  # the first move takes the memory; a job does it once
        self.arena.onload()

    def out(self) -> None:
        self.arena.offload(self.tensors)

    def back(self) -> None:
        self.arena.onload()

    def close(self) -> None:
        self.arena.close()
        super().close()


class PinnedAnew(Way):
    """Pinned memory allocated for each move."""

    disk = durable = False

    def out(self) -> None:
        self.copies = [
            torch.empty(shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda").copy_(
                tensor
            )
            for shape, tensor in zip(self.shapes, self.tensors, strict=True)
        ]
        self.free()

    def back(self) -> None:
        self.tensors = [copy.to(self.device, copy=True) for copy in self.copies]
        del self.copies
        if self.device.type == "cuda":
            torch._C._host_emptyCache()


class Raw(Way):
    """The floor: requests of our block size straight from ready memory, at a fixed depth; nothing is copied.

    The memory is in huge pages like ours: a request from scattered 4 KiB pages reaches the device in more pieces.
    """

    depth = 1

    def prepare(self) -> None:
        self.size = sum(shape.numel() for shape in self.shapes)
        self.free()
        self.block = 2 * self.chunk_bytes // 8
        self.path = self.folder / "raw.bin"
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self.end = self.size // self.block * self.block
        os.posix_fallocate(self.fd, 0, self.end)
        self.memory = PinnedMemory(self.depth * self.block, torch.device("cpu"), purpose="raw")
        self.memory.tensor.random_(0, 256)
        self.buffers = [
            self.memory.view(slot * self.block, self.block) for slot in range(self.depth)
        ]

    def _run(self, request: Any) -> None:
        offsets = iter(range(0, self.end, self.block))
        take = threading.Lock()

        def work(buffer: memoryview) -> None:
            while True:
                with take:
                    offset = next(offsets, None)
                if offset is None:
                    return
                if request(self.fd, [buffer], offset) != self.block:
                    raise OSError("short")

        with ThreadPoolExecutor(self.depth) as pool:
            list(pool.map(work, self.buffers))

    def out(self) -> None:
        self._run(os.pwritev)
        os.fdatasync(self.fd)

    def back(self) -> None:
        self._run(os.preadv)

    def close(self) -> None:
        os.close(self.fd)
        self.path.unlink()
        self.buffers = []
        self.memory.close()


class Raw2(Raw):
    depth = 2


class Raw4(Raw):
    depth = 4


class Raw8(Raw):
    depth = 8


WAYS: dict[str, type[Way]] = {
    "raw depth 1": Raw,
    "raw depth 2": Raw2,
    "raw depth 4": Raw4,
    "raw depth 8": Raw8,
    "ours": Ours,
    "ours, CRC-32": OursChecksums,
    "ours, buffered": OursBuffered,
    "torch.save": TorchSave,
    "safetensors": SafeTensors,
    "numpy memmap": Memmap,
    "plain buffered": PlainBuffered,
    "recipe of Miles": MilesRecipe,
    "kvikio": KvikIo,
    "torch_memory_saver disk": SaverDisk,
    "ours, saver region": OursSaverRegion,
    "host arena": Arena,
    "pinned anew": PinnedAnew,
    "torch_memory_saver pinned": SaverPinned,
}


def resident() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def write_all(fd: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(fd, data[done : done + (1 << 30)])


def read_all(fd: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        count = os.readv(fd, [data[done : done + (1 << 30)]])
        if count == 0:
            raise EOFError
        done += count


def _array(tensor: torch.Tensor) -> Any:
    return tensor.numpy() if tensor.device.type == "cpu" else tensor
