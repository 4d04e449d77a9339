"""Offload of GPU memory on a real GPU: bit-equal, memory really freed, ordered against work in flight."""

import pytest
import torch

from miles_hpc.trainer.disk_offload import DiskOffload, SaverRegion, as_bytes
from miles_hpc.trainer.host_arena import HostArena
from miles_hpc.trainer.streamed_adam import AdamSettings, StreamedAdam

MIB = 1 << 20
hopper = pytest.mark.gpu(generation="hopper", count=1)


def some_tensors() -> list[torch.Tensor]:
    base = torch.randn(33 * MIB + 5, device="cuda")
    return [
        base,
        base[7::3],
        torch.empty(0, device="cuda"),
        torch.randn(1001, 77, device="cuda").bfloat16().t(),
        torch.randint(0, 256, (513,), device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.randint(0, 256, (300 * MIB + 1,), device="cuda", dtype=torch.uint8),
    ]


def check(mover, tensors: list[torch.Tensor]) -> None:
    before = [as_bytes(tensor.untyped_storage()).clone() for tensor in tensors]
    total = sum({t.untyped_storage()._cdata: t.untyped_storage().size() for t in tensors}.values())
    for _ in range(2):
        used = torch.cuda.mem_get_info()[0]
        moved = mover.offload(tensors)
        assert moved.num_bytes == total
        assert torch.cuda.mem_get_info()[0] - used > 0.9 * total
        mover.onload()
        after = [as_bytes(tensor.untyped_storage()) for tensor in tensors]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    mover.close()


@hopper
@pytest.mark.parametrize("mode", ["auto", "buffered"])
def test_gpu_tensors_survive_the_disk_and_their_memory_is_freed(tmp_path, mode):
    device = torch.device("cuda")
    check(
        DiskOffload(tmp_path / "f", device=device, chunk_bytes=32 * MIB, mode=mode, checksums=True),
        some_tensors(),
    )


@hopper
def test_gpu_tensors_survive_the_host_arena():
    check(HostArena(device=torch.device("cuda")), some_tensors())


@hopper
def test_work_in_flight_on_the_callers_stream_is_seen(tmp_path):
    mover = DiskOffload(tmp_path / "f", device=torch.device("cuda"), chunk_bytes=8 * MIB)
    value = torch.zeros(64 * MIB, dtype=torch.int32, device="cuda")
    side = torch.cuda.Stream()
    for _ in range(3):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            value += 1
            mover.offload([value])
            mover.onload()
            value += 1
        torch.cuda.current_stream().wait_stream(side)
    assert (value == 6).all()
    mover.close()


@hopper
def test_a_memory_saver_region_keeps_addresses_and_bytes(tmp_path):
    saver = pytest.importorskip("torch_memory_saver").torch_memory_saver
    saver.hook_mode = "torch"
    with saver.region(tag="ours"):
        tensors = [torch.randint(0, 1 << 30, (40 * MIB,), device="cuda") for _ in range(3)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    sums = [tensor.sum().item() for tensor in tensors]
    mover = DiskOffload(
        tmp_path / "f",
        device=torch.device("cuda"),
        chunk_bytes=32 * MIB,
        memory=SaverRegion(saver, "ours"),
    )
    for _ in range(2):
        used = torch.cuda.mem_get_info()[0]
        moved = mover.offload(tensors)
        assert torch.cuda.mem_get_info()[0] - used > 0.9 * moved.num_bytes
        mover.onload()
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        assert [tensor.sum().item() for tensor in tensors] == sums
    mover.close()


@hopper
def test_streamed_adam_follows_torch_adamw_on_the_gpu(tmp_path):
    torch.manual_seed(0)
    mine = torch.nn.Parameter(torch.randn(3 * MIB + 11, device="cuda"))
    plain = torch.nn.Parameter(mine.detach().clone())
    reference = torch.optim.AdamW([plain], lr=1e-2, weight_decay=0.1, foreach=False)
    optimizer = StreamedAdam(
        [("w", mine)],
        AdamSettings(learning_rate=1e-2, weight_decay=0.1),
        path=tmp_path / "state",
        device=torch.device("cuda"),
        bucket_bytes=4 * MIB,
        chunk_bytes=2 * MIB,
    )
    for _ in range(4):
        mine.grad = torch.randn_like(mine)
        plain.grad = mine.grad.clone()
        optimizer.step()
        reference.step()
        torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-7)
    optimizer.close()
