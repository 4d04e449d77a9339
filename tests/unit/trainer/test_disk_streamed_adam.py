"""Streaming changes where the optimizer state lives and nothing of what it computes."""

import errno
import json
import os
import subprocess
import sys

import pytest
import torch

from miles_hpc.errors import ResumeError
from miles_hpc.filesystem import resident_bytes
from miles_hpc.trainer.disk_file import DiskOffloadError
from miles_hpc.trainer.streamed_adam import AdamSettings, StreamedAdam

CPU = torch.device("cpu")
SETTINGS = AdamSettings(learning_rate=3e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)
TOPOLOGY = {"tp": 1, "pp": 2, "dp": 1}


def model_of(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(61, 127),
        torch.nn.Tanh(),
        torch.nn.Linear(127, 33),
        torch.nn.Tanh(),
        torch.nn.Linear(33, 1),
    ).to(dtype)


def streamed(
    model: torch.nn.Module, path, *, bucket_bytes: int = 3 * 8192, **options
) -> StreamedAdam:
    return StreamedAdam(
        list(model.named_parameters()),
        SETTINGS,
        path=path,
        device=CPU,
        bucket_bytes=bucket_bytes,
        chunk_bytes=16384,
        **options,
    )


def backward(model: torch.nn.Module, step: int) -> float:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(9, 61, generator=generator, dtype=torch.float32)
    loss = model(inputs.to(next(model.parameters()).dtype)).float().square().mean()
    loss.backward()
    return loss.item()


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("bucket_bytes", [1, 3 * 8192, 3 << 20])
def test_losses_equal_torch_adamw(tmp_path, bucket_bytes):
    plain, ours = model_of(), model_of()
    reference = torch.optim.AdamW(
        plain.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1, foreach=False
    )
    optimizer = streamed(ours, tmp_path / "state", bucket_bytes=bucket_bytes)
    for step in range(6):
        assert backward(plain, step) == pytest.approx(backward(ours, step), rel=1e-5)
        reference.step()
        reference.zero_grad()
        traffic = optimizer.step()
        optimizer.zero_grad()
        numel = sum(parameter.numel() for parameter in ours.parameters())
        # The first step also writes the state that it starts from.
        assert traffic.written_bytes == 12 * numel * (2 if step == 0 else 1)
        assert traffic.read_bytes == (0 if step == 0 else 12 * numel)
        assert resident_bytes(tmp_path / "state") == 0
    for a, b in zip(weights(plain), weights(ours), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    optimizer.close()
    assert not (tmp_path / "state").exists()


def test_bucket_size_and_io_mode_change_no_bit(tmp_path):
    results = []
    for number, (bucket, mode) in enumerate([(1, "auto"), (3 * 40960, "buffered")]):
        model = model_of(torch.bfloat16)
        optimizer = streamed(model, tmp_path / f"s{number}", bucket_bytes=bucket, mode=mode)
        for step in range(4):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model))
        optimizer.close()
    # Vector lanes end elsewhere when a parameter is cut elsewhere; after rounding to bf16 nothing of it may be left.
    assert same(*results)


def test_bf16_weights_follow_fp32_main_weights(tmp_path):
    """Updates far below one bf16 step add up in the main weights until they show."""
    parameter = torch.nn.Parameter(torch.full((3000,), 256.0, dtype=torch.bfloat16))
    optimizer = StreamedAdam(
        [("w", parameter)],
        AdamSettings(learning_rate=0.2),
        path=tmp_path / "s",
        device=CPU,
        bucket_bytes=1,
        chunk_bytes=8192,
    )
    seen = []
    for _ in range(8):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        seen.append(parameter[0].item())
    assert seen[0] == 256.0
    assert seen[-1] == 254.0
    optimizer.close()


def test_main_grad_is_used_and_a_parameter_without_gradient_is_left_alone(tmp_path):
    first, second = torch.nn.Parameter(torch.ones(5000)), torch.nn.Parameter(torch.ones(5000))
    first.main_grad = torch.ones(5000)
    optimizer = StreamedAdam(
        [("a", first), ("b", second)],
        SETTINGS,
        path=tmp_path / "s",
        device=CPU,
        bucket_bytes=1,
        chunk_bytes=8192,
    )
    optimizer.step()
    assert (first < 1).all()
    assert (second == 1).all()
    # Its own first step comes later, with a first step's bias correction.
    second.grad = torch.ones(5000)
    first.main_grad = torch.zeros(5000)
    optimizer.step()
    expected = 1 * (1 - 3e-3 * 0.1) - 3e-3
    torch.testing.assert_close(second.detach(), torch.full((5000,), expected))
    optimizer.close()


def test_one_bucket_is_all_that_is_resident(tmp_path):
    model = model_of()
    optimizer = streamed(model, tmp_path / "s", bucket_bytes=3 * 4096)
    assert optimizer.bucket_bytes == 3 * 4096
    assert optimizer.state_bytes > 8 * optimizer.bucket_bytes
    optimizer.close()


def test_a_bucket_is_no_larger_than_the_state(tmp_path):
    model = model_of()
    numel = sum(parameter.numel() for parameter in model.parameters())
    optimizer = streamed(model, tmp_path / "s", bucket_bytes=1 << 40)
    assert 12 * numel <= optimizer.bucket_bytes < 12 * numel + 3 * 4096
    assert (tmp_path / "s").stat().st_size == optimizer.file_bytes < 2 * (12 * numel + 4 * 4096)
    optimizer.close()


@pytest.mark.parametrize("failing_step", [0, 2])
def test_a_disk_that_fills_in_the_step_changes_nothing(tmp_path, monkeypatch, failing_step):
    plain, ours = model_of(torch.bfloat16), model_of(torch.bfloat16)
    straight = streamed(plain, tmp_path / "plain")
    optimizer = streamed(ours, tmp_path / "state")
    really = os.pwritev
    for step in range(4):
        backward(plain, step)
        straight.step()
        straight.zero_grad()
        backward(ours, step)
        if step == failing_step:
            before, offsets = weights(ours), []

            def pwritev(fd, buffers, offset, offsets=offsets):
                offsets.append(offset)
                if len(offsets) > 5:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return really(fd, buffers, offset)

            monkeypatch.setattr(os, "pwritev", pwritev)
            with pytest.raises(DiskOffloadError) as failure:
                optimizer.step()
            monkeypatch.setattr(os, "pwritev", really)
            assert same(before, weights(ours))
            assert str(failure.value).startswith(f"{tmp_path / 'state'}: writing at byte ")
            assert f"({optimizer.file_bytes} bytes)" in str(failure.value)
            assert " free" in str(failure.value)
        optimizer.step()
        optimizer.zero_grad()
        # Not a digit differs from a run whose disk never filled: the second try started from the same state.
        assert same(weights(plain), weights(ours))
    straight.close()
    optimizer.close()


def test_a_step_that_cannot_be_taken_back_says_so(tmp_path, monkeypatch):
    model = model_of()
    optimizer = streamed(model, tmp_path / "state")
    backward(model, 0)
    optimizer.step()

    def broken(fd, buffers, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    really = os.pwritev
    writes = []

    def pwritev(fd, buffers, offset):
        writes.append(offset)
        if len(writes) > 3:
            monkeypatch.setattr(os, "preadv", broken)
            broken(fd, buffers, offset)
        return really(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    with pytest.raises(
        DiskOffloadError, match=r"partly updated: continue from the last checkpoint"
    ):
        optimizer.step()
    monkeypatch.undo()
    optimizer.close()


MEMORY = """
import json, os, sys, threading
from pathlib import Path
import torch
from miles_hpc.trainer.streamed_adam import AdamSettings, StreamedAdam

def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

numel, bucket, chunk = (int(word) for word in sys.argv[2:])
parameter = torch.nn.Parameter(torch.ones(numel))
parameter.grad = torch.ones(numel)
peak, done = [0], threading.Event()

# Maps the code of every operator and thread before the baseline is taken.
small = torch.nn.Parameter(torch.ones(1000))
small.grad = torch.ones(1000)
warm = StreamedAdam([("w", small)], AdamSettings(learning_rate=1e-3), path=Path(sys.argv[1] + ".warm"),
                    device=torch.device("cpu"), bucket_bytes=1, chunk_bytes=chunk)
for _ in range(2):
    warm.step()
warm.close()

def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], rss())

base = rss()
optimizer = StreamedAdam([("w", parameter)], AdamSettings(learning_rate=1e-3), path=Path(sys.argv[1]),
                         device=torch.device("cpu"), bucket_bytes=bucket, chunk_bytes=chunk)
watcher = threading.Thread(target=watch)
watcher.start()
for _ in range(2):
    optimizer.step()
done.set()
watcher.join()
print(json.dumps({"above": peak[0] - base, "state": optimizer.state_bytes}))
optimizer.close()
"""


def test_host_memory_is_a_bucket_two_chunks_and_adams_temporaries(tmp_path):
    mib = 1 << 20
    bucket, chunk, numel = 24 * mib, 4 * mib, 24 * mib
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "f"), str(numel), str(bucket), str(chunk)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            # Freed temporaries go back to the system at once, or the peak depends on where malloc finds room.
            "MALLOC_MMAP_THRESHOLD_": str(mib),
        },
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    # torch's AdamW makes a square root and a quotient of one third of the bucket each; the rest is threads' stacks.
    allowed = bucket + 2 * chunk + 2 * bucket // 3 + 12 * mib
    assert seen["state"] >= 12 * numel > 3 * allowed
    assert bucket < seen["above"] <= allowed


def test_a_resumed_run_is_bit_equal(tmp_path):
    def run(model, optimizer, steps):
        for step in steps:
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()

    straight = model_of()
    optimizer = streamed(straight, tmp_path / "a")
    run(straight, optimizer, range(3))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    saved = weights(straight)
    optimizer.save(folder, rank=3, topology=TOPOLOGY)
    run(straight, optimizer, range(3, 6))
    optimizer.close()

    resumed = model_of()
    with torch.no_grad():
        for parameter, value in zip(resumed.parameters(), saved, strict=True):
            parameter.copy_(value)
    again = streamed(resumed, tmp_path / "b")
    again.load(folder, rank=3, topology=TOPOLOGY)
    run(resumed, again, range(3, 6))
    again.close()
    assert same(weights(resumed), weights(straight))
    assert resident_bytes(folder / "optimizer-rank00003.bin") == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topology": {"tp": 2, "pp": 1, "dp": 1}}, r"topology was .*'pp': 2.*expected .*'tp': 2"),
        ({"rank": 1}, "expected the optimizer state of rank 1"),
    ],
)
def test_another_topology_is_refused(tmp_path, change, message):
    model = model_of()
    optimizer = streamed(model, tmp_path / "s")
    optimizer.save(tmp_path, rank=0, topology=TOPOLOGY)
    with pytest.raises(ResumeError, match=message):
        optimizer.load(tmp_path, **({"rank": 0, "topology": TOPOLOGY} | change))
    optimizer.close()


def test_other_parameters_other_buckets_and_a_cut_file_are_refused(tmp_path):
    optimizer = streamed(model_of(), tmp_path / "s")
    optimizer.save(tmp_path, rank=0, topology=TOPOLOGY)
    optimizer.close()
    other = StreamedAdam(
        [("w", torch.nn.Parameter(torch.ones(9)))],
        SETTINGS,
        path=tmp_path / "o",
        device=CPU,
        bucket_bytes=3 * 8192,
        chunk_bytes=8192,
    )
    with pytest.raises(ResumeError, match="parameters was"):
        other.load(tmp_path, rank=0, topology=TOPOLOGY)
    other.close()
    bigger = streamed(model_of(), tmp_path / "b", bucket_bytes=3 * 40960)
    with pytest.raises(ResumeError, match="bucket_bytes was 24576 when saved, expected 122880 now"):
        bigger.load(tmp_path, rank=0, topology=TOPOLOGY)
    bigger.close()
    again = streamed(model_of(), tmp_path / "again")
    with (tmp_path / "optimizer-rank00000.bin").open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(ResumeError, match="found 4096 bytes, expected"):
        again.load(tmp_path, rank=0, topology=TOPOLOGY)
    (tmp_path / "optimizer-rank00000.json").write_text(json.dumps([1]))
    with pytest.raises(ResumeError, match="expected the optimizer state of rank 0"):
        again.load(tmp_path, rank=0, topology=TOPOLOGY)
    again.close()


def test_parameters_that_cannot_be_cut_are_refused(tmp_path):
    with pytest.raises(DiskOffloadError, match="parameter w with strides"):
        StreamedAdam(
            [("w", torch.nn.Parameter(torch.ones(4, 5).t()))],
            SETTINGS,
            path=tmp_path / "s",
            device=CPU,
            bucket_bytes=1,
            chunk_bytes=8192,
        )
