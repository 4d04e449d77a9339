"""The shelf that a trainer rank sees: chosen by the spec, measured, safe to call twice."""

import torch

from miles_hpc.spec.job import OffloadTable
from miles_hpc.trainer.offload import HostShelf, make_shelf

CPU = torch.device("cpu")


def environ_of(tmp_path) -> dict[str, str]:
    return {
        "MILES_HPC_SCRATCH": str(tmp_path),
        "MILES_HPC_ATTEMPT_DIR": str(tmp_path / "attempts/1"),
    }


def test_disk_gives_host_memory_back_and_says_what_it_did(tmp_path):
    tensors = [torch.ones(16 << 20), torch.ones(16 << 20)]
    shelf = make_shelf(OffloadTable(chunk="16MiB"), CPU, 0, environ_of(tmp_path))
    out = shelf.offload(tensors)
    assert out.bytes == 128 << 20
    # 128 MiB of tensors went, 32 MiB of staging memory was already there.
    assert out.rss_before - out.rss_after > 100 << 20
    assert out.path == str(tmp_path / "offload/attempt-1/rank-0/trainer.bin")
    assert out.direct
    assert out.cached == 0
    assert shelf.offload(tensors).bytes == 0
    back = shelf.onload()
    assert back.bytes == 128 << 20
    assert back.cached == 0
    assert shelf.onload().bytes == 0
    assert all(tensor.sum() == 16 << 20 for tensor in tensors)
    shelf.close()
    assert not (tmp_path / "offload").exists()


def test_host_and_none_have_no_file(tmp_path):
    for train in ("none", "host"):
        shelf = make_shelf(OffloadTable(train=train), CPU, 0, environ_of(tmp_path))
        tensor = torch.ones(100)
        assert shelf.offload([tensor]).bytes == 0
        assert shelf.onload().path == ""
        shelf.close()
    arena, tensor = HostShelf(CPU), torch.ones(100)
    assert arena.offload([tensor]).bytes == 400
    assert arena.offload([tensor]).bytes == 0
    assert arena.onload().bytes == 400
    assert tensor.sum() == 100
    arena.close()
