"""Step time of `StreamedAdam` against torch.optim.AdamW in memory and against the disk's raw direct-I/O rate.

    python tests/bench/streamed_adam.py --folder /scratch/me --parameters 64MiB --rounds 5 [--device cuda:0]

Rounds take turns: raw rates, a step in memory, a streamed step, all over the same parameters, so that other work on the
machine hits each of them alike. The floor is reading and writing the state once at the raw rates, plus the step in memory.
Medians are printed as a table of Markdown.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from miles_hpc.trainer.streamed_adam import AdamSettings, StreamedAdam
from miles_hpc.units import parse_bytes
from tests.bench.offload_ways import MIB, Raw8, resident

SETTINGS = AdamSettings(learning_rate=1e-4, weight_decay=0.1)
NUM_TENSORS = 8


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Return how long `action` takes, device work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def parameters_of(numel: int, device: torch.device) -> list[torch.nn.Parameter]:
    """Return parameters with gradients, `numel` elements together."""
    generator = torch.Generator(device).manual_seed(0)
    found = []
    for _ in range(NUM_TENSORS):
        values = torch.randn(numel // NUM_TENSORS, generator=generator, device=device)
        parameter = torch.nn.Parameter(values)
        parameter.grad = torch.randn(numel // NUM_TENSORS, generator=generator, device=device)
        found.append(parameter)
    return found


def raw_seconds(folder: Path, num_bytes: int, chunk: int) -> tuple[float, float]:
    """Return the seconds of writing and of reading `num_bytes` at depth 8, without a copy."""
    folder.mkdir()
    way = Raw8(folder, [torch.zeros(num_bytes, dtype=torch.uint8)], chunk)
    try:
        scale = num_bytes / way.end
        out = seconds(way.out, torch.device("cpu"))
        way.drop()
        return out * scale, seconds(way.back, torch.device("cpu")) * scale
    finally:
        way.close()
        folder.rmdir()


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of every round, by name, and host memory above the baseline."""
    device = torch.device(options.device)
    plain = parameters_of(options.parameters, device)
    in_memory = torch.optim.AdamW(
        plain, lr=SETTINGS.learning_rate, weight_decay=SETTINGS.weight_decay, foreach=False
    )
    in_memory.step()
    parameters = parameters_of(options.parameters, device)
    baseline = resident()
    streamed = StreamedAdam(
        [(str(number), parameter) for number, parameter in enumerate(parameters)],
        SETTINGS,
        path=options.folder / "state.bin",
        device=device,
        bucket_bytes=options.bucket,
        chunk_bytes=options.chunk,
    )
    found: dict[str, list[float]] = {}
    try:
        first = streamed.step()
        found["first step"] = [first.seconds]
        for number in range(options.rounds):
            raw = options.folder / f"raw-{number}"
            out, back = raw_seconds(raw, 12 * options.parameters, options.chunk)
            found.setdefault("raw out", []).append(out)
            found.setdefault("raw back", []).append(back)
            found.setdefault("in memory", []).append(seconds(in_memory.step, device))
            found.setdefault("streamed", []).append(seconds(streamed.step, device))
        found["host MiB"] = [(resident() - baseline) / MIB]
        gaps = [(a - b).abs().max().item() for a, b in zip(plain, parameters, strict=True)]
        found["gap"] = [max(gaps)]
    finally:
        streamed.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument(
        "--parameters", type=parse_bytes, default=64 * MIB, help="number, written as a size"
    )
    parser.add_argument("--bucket", type=parse_bytes, default=256 * MIB)
    parser.add_argument("--chunk", type=parse_bytes, default=64 * MIB)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    found = measure(options)
    middle = {name: statistics.median(values) for name, values in found.items()}
    state = 12 * options.parameters
    floor = middle["raw out"] + middle["raw back"] + middle["in memory"]
    lines = (
        f"{options.parameters} parameters, state {state / 1e9:.2f} GB, median of {options.rounds} rounds",
        "",
        "| what | seconds | GB/s of state |",
        "|---|---|---|",
        *(
            f"| {name} | {middle[name]:.2f} | {state / middle[name] / 1e9:.2f} |"
            for name in ("raw out", "raw back", "in memory", "streamed", "first step")
        ),
        f"| floor: raw out + raw back + in memory | {floor:.2f} | |",
        "",
        (
            f"streamed / in memory {middle['streamed'] / middle['in memory']:.1f}, "
            f"floor / streamed {floor / middle['streamed']:.2f}, "
            f"host memory left {middle['host MiB']:.0f} MiB, largest difference {middle['gap']:.1e}"
        ),
    )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
