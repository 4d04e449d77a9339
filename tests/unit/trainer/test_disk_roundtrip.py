"""What goes out to disk comes back bit for bit: odd and zero sizes, views, gaps, shared storages, every dtype."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles_hpc.filesystem import resident_bytes
from miles_hpc.trainer.disk_file import DiskOffloadError
from miles_hpc.trainer.disk_layout import ALIGNMENT_BYTES
from miles_hpc.trainer.disk_offload import DiskOffload, as_bytes

CPU = torch.device("cpu")


def random_bytes(count: int, seed: int) -> torch.Tensor:
    return torch.frombuffer(
        bytearray(random.Random(seed).randbytes(count) or b"\0"), dtype=torch.uint8
    )[:count].clone()


def dtypes() -> list[torch.dtype]:
    """Every dtype of this torch whose values can be laid over bytes."""
    found = []
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        try:
            torch.zeros(16, dtype=torch.uint8).view(dtype)
        except RuntimeError:
            continue
        found.append(dtype)
    return sorted(found, key=str)


def shape_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)


def raw(tensors: list[torch.Tensor]) -> list[bytes]:
    return [bytes(as_bytes(tensor.untyped_storage()).tolist()) for tensor in tensors]


def check_roundtrip(path: Path, tensors: list[torch.Tensor], *, chunk: int, mode: str) -> None:
    before, shapes = raw(tensors), [shape_of(tensor) for tensor in tensors]
    offload = DiskOffload(path, device=CPU, chunk_bytes=chunk, mode=mode, checksums=True)
    try:
        for _ in range(2):
            moved = offload.offload(tensors)
            assert all(tensor.untyped_storage().size() == 0 for tensor in tensors)
            distinct = {tensor.untyped_storage()._cdata for tensor in tensors}
            sizes = {
                tensor.untyped_storage()._cdata: len(data)
                for tensor, data in zip(tensors, before, strict=True)
            }
            assert moved.num_bytes == sum(sizes[key] for key in distinct)
            assert offload.onload().num_bytes == moved.num_bytes
            assert raw(tensors) == before
            assert [shape_of(tensor) for tensor in tensors] == shapes
    finally:
        offload.close()
    assert not path.exists()


def test_there_are_many_dtypes_to_try():
    assert {torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn} <= set(
        dtypes()
    )


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_each_dtype_survives(tmp_path, dtype):
    tensors = [random_bytes(16 * 1021, seed).view(dtype) for seed in range(3)]
    check_roundtrip(tmp_path / "f", tensors, chunk=ALIGNMENT_BYTES, mode="auto")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_set_of_tensors_survives(tmp_path, data):
    tensors = []
    for seed in range(data.draw(st.integers(0, 8))):
        rows, columns = data.draw(st.integers(0, 97)), data.draw(st.integers(0, 131))
        dtype = data.draw(st.sampled_from(dtypes()))
        raw_size = rows * columns * dtype.itemsize
        base = random_bytes(raw_size, seed).view(dtype).reshape(rows, columns)
        kind = data.draw(st.sampled_from(["whole", "transposed", "strided", "slice", "shared"]))
        views = {
            "whole": [base],
            "transposed": [base.t()],
            "strided": [base[::2, ::3]],
            "slice": [base[rows // 3 : rows // 2]],
            "shared": [base, base.t(), base[:1]],
        }
        tensors += views[kind]
    path = tmp_path / f"f{data.draw(st.integers(0, 10**9))}"
    check_roundtrip(
        path,
        tensors,
        chunk=data.draw(st.integers(1, 9)) * ALIGNMENT_BYTES + data.draw(st.integers(0, 5000)),
        mode=data.draw(st.sampled_from(["auto", "buffered"])),
    )


def test_a_module_trains_on_as_if_nothing_had_happened(tmp_path):
    def run(*, offloaded: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(33, 65), torch.nn.Tanh(), torch.nn.Linear(65, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        disk = DiskOffload(tmp_path / "f", device=CPU, chunk_bytes=8192) if offloaded else None
        losses = []
        for _ in range(4):
            loss = model(torch.ones(5, 33)).square().mean() + 1
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if disk is not None:
                state = [
                    value
                    for entry in optimizer.state.values()
                    for value in entry.values()
                    if isinstance(value, torch.Tensor)
                ]
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                disk.offload([*model.parameters(), *grads, *state])
                disk.onload()
        if disk is not None:
            disk.close()
        return losses

    assert run(offloaded=True) == run(offloaded=False)


def test_the_file_follows_what_is_out_and_leaves_no_page_cache(tmp_path):
    for mode in ("auto", "buffered"):
        offload = DiskOffload(tmp_path / mode, device=CPU, chunk_bytes=1 << 20, mode=mode)
        for count in (5 << 20, 9 << 20, 1 << 20):
            tensors = [random_bytes(count, 1)]
            offload.offload(tensors)
            assert offload.path.stat().st_size == count
            assert resident_bytes(offload.path) == 0
            offload.onload()
            assert resident_bytes(offload.path) == 0
        offload.close()


def test_offload_twice_and_onload_without_offload_are_refused(tmp_path):
    offload = DiskOffload(tmp_path / "f", device=CPU, chunk_bytes=8192)
    with pytest.raises(DiskOffloadError, match="expected an offload before onload"):
        offload.onload()
    offload.offload([torch.ones(10)])
    with pytest.raises(DiskOffloadError, match="Onload before the next offload"):
        offload.offload([torch.ones(10)])
    offload.close()


def test_memory_of_another_owner_is_refused_and_untouched(tmp_path):
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(1000, dtype=numpy.float32)
    mine = torch.ones(7)
    offload = DiskOffload(tmp_path / "f", device=CPU, chunk_bytes=8192)
    with pytest.raises(DiskOffloadError, match="belongs to another owner"):
        offload.offload([mine, torch.from_numpy(array)])
    with pytest.raises(DiskOffloadError, match="expected strided tensors"):
        offload.offload([mine, torch.eye(3).to_sparse()])
    assert mine.sum() == 7
    assert not offload.is_out
    offload.close()


def test_a_chunk_below_one_page_is_refused(tmp_path):
    with pytest.raises(DiskOffloadError, match=r"Set offload\.chunk"):
        DiskOffload(tmp_path / "f", device=CPU, chunk_bytes=100)
