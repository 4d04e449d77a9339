"""Offload to disk against the disk's own limit and against other ways, in one run on the same disk and the same bytes.

    python tests/bench/offload.py --folder /scratch/me --total 1GiB --ranks 1,8 --repeats 3 --json out.json

One process a rank; all start each move together. A rate is all ranks' bytes over the time from the first start to the last
end. The limit is the best raw direct-I/O rate over depths 1 to 8 at our block size. Ways take turns within a repeat, so
that a slow minute of a shared disk hits all of them; each figure is the median over the repeats.
"""

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from offload_plot import NOT_ON_DISK, TARGET, draw, panels_of_page
from offload_ways import MIB, WAYS, Way, resident

from miles_hpc.filesystem import describe_path
from miles_hpc.units import format_bytes, parse_bytes


class Watch(threading.Thread):
    """Peak resident memory of this process while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = resident()
        self._done = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, resident())

    def stop(self) -> int:
        self._done.set()
        self.join()
        return max(self.peak, resident())


def status_kib(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    return 0


def make_base(total: int, device: torch.device, rank: int) -> list[torch.Tensor]:
    """Random bytes in tensors of a trainer's sizes: a few large odd ones and many small ones."""
    generator = torch.Generator(device=device).manual_seed(rank)
    sizes = [total // 8 - 4097 - i for i in range(8)] + [1023 + 64 * i for i in range(32)]
    return [
        torch.randint(0, 256, (size,), dtype=torch.uint8, device=device, generator=generator)
        for size in sizes
    ]


def serve(
    link: Connection, rank: int, folder: Path, total: int, chunk: int, device_name: str
) -> None:
    """One rank: build a way, move on command, report times and memory."""
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    device = torch.device(device_name)
    folder.mkdir()
    base = make_base(total, device, rank)
    way: Way | None = None
    while True:
        command, argument = link.recv()
        try:
            if command == "end":
                return
            reply: Any = None
            if command == "build":
                way = WAYS[argument](folder, base, chunk)
            elif command in ("out", "back"):
                assert way is not None
                watch = Watch()
                _sync(device)
                started = time.monotonic()
                getattr(way, command)()
                _sync(device)
                ended = time.monotonic()
                reply = {
                    "started": started,
                    "ended": ended,
                    "rss": watch.stop() - way.baseline,
                    "cached": way.cached_bytes(),
                    "pinned": status_kib("VmPin") + status_kib("VmLck"),
                }
                if command == "out":
                    way.drop()
            elif command == "close":
                assert way is not None
                if way.tensors:
                    pairs = zip(way.tensors, base, strict=True)
                    assert all(torch.equal(a, b) for a, b in pairs), "bytes differ"
                way.close()
                way = None
            link.send(("done", reply))
        except Exception:  # noqa: BLE001 - a way that fails becomes a row that says so
            link.send(("failed", traceback.format_exc()))
            way = None


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Ranks:
    """The processes of one group of ranks."""

    def __init__(self, count: int, folder: Path, options: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.links: list[Connection] = []
        self.processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(
                    theirs,
                    rank,
                    folder / f"rank-{rank}",
                    options.total // count,
                    options.chunk,
                    options.device,
                ),
            )
            process.start()
            theirs.close()  # so that a rank that dies is an end of file here, and no wait for ever
            self.links.append(ours)
            self.processes.append(process)

    def call(self, command: str, argument: str = "") -> list[Any]:
        for link in self.links:
            link.send((command, argument))
        replies = [link.recv() for link in self.links]
        failures = [text for state, text in replies if state == "failed"]
        if failures:
            raise RuntimeError(failures[0])
        return [reply for _, reply in replies]

    def end(self) -> None:
        for link in self.links:
            link.send(("end", ""))
        for process in self.processes:
            process.join()


def move(ranks: Ranks, command: str, total: int) -> dict[str, float]:
    replies = ranks.call(command)
    seconds = max(r["ended"] for r in replies) - min(r["started"] for r in replies)
    return {
        "gb_s": total / seconds / 1e9,
        "rss_mib": max(r["rss"] for r in replies) / MIB,
        "cached_mib": max(r["cached"] for r in replies) / MIB,
        "pinned_mib": max(r["pinned"] for r in replies) / 1024,
    }


def measure(options: argparse.Namespace, count: int, folder: Path) -> dict[str, Any]:
    """Return {way: {"out": figures, "back": figures}} for `count` ranks."""
    ranks = Ranks(count, folder, options)
    names = list(options.ways)
    seen: dict[str, dict[str, list[dict[str, float]]]] = {}
    for repeat in range(options.repeats):
        shift = repeat * 3 % len(names)
        for name in names[shift:] + names[:shift]:
            if name in seen and seen[name].get("failed"):
                continue
            entry = seen.setdefault(name, {"out": [], "back": []})
            try:
                ranks.call("build", name)
                for cycle in range(
                    2
                ):  # the first cycle meets an unwritten file, the second is every later step
                    figures = [move(ranks, command, options.total) for command in ("out", "back")]
                    if cycle == 1 or not reusable(name):
                        entry["out"].append(figures[0])
                        entry["back"].append(figures[1])
                    else:
                        entry.setdefault("first", []).append(figures[0])
                    if not reusable(name):
                        break
                ranks.call("close")
            except RuntimeError as error:
                entry["failed"] = [{"why": str(error)}]  # type: ignore[dict-item]
                print(f"{name}: {error}", file=sys.stderr)
    ranks.end()
    return {name: summary(entry) for name, entry in seen.items()}


def reusable(name: str) -> bool:
    """Whether a later move writes into the file of the one before, as a job's does."""
    return name.startswith(("raw", "ours", "torch_memory_saver"))


def summary(entry: dict[str, Any]) -> dict[str, Any]:
    if "failed" in entry:
        return {"failed": entry["failed"][0]["why"].strip().splitlines()[-1]}
    result = {}
    for direction in ("first", "out", "back"):
        if direction in entry:
            result[direction] = {
                key: statistics.median(figures[key] for figures in entry[direction])
                for key in entry[direction][0]
            }
            result[direction]["max_gb_s"] = max(figures["gb_s"] for figures in entry[direction])
    return result


def limits_of(results: dict[str, Any]) -> dict[str, float]:
    """Return the best raw rate over the depths, for each direction."""
    return {
        direction: max(
            (
                figures[direction]["gb_s"]
                for name, figures in results.items()
                if name.startswith("raw") and direction in figures
            ),
            default=float("nan"),
        )
        for direction in ("out", "back")
    }


def table(results: dict[str, Any], count: int) -> list[str]:
    """Print one group's figures; the ratio is to the best raw depth of that direction."""
    limit = limits_of(results)
    lines = [
        f"### {count} rank(s); limit {limit['out']:.2f} GB/s out, {limit['back']:.2f} GB/s back",
        "",
        "| way | out GB/s | of limit | back GB/s | of limit | host memory + MiB a rank, out / back | page cache left MiB a rank, out / back |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, figures in results.items():
        if "failed" in figures:
            lines.append(f"| {name} | failed: {figures['failed'][:120]} | | | | | |")
            continue
        out, back = figures["out"], figures["back"]
        lines.append(
            f"| {name} | {out['gb_s']:.2f} | {out['gb_s'] / limit['out']:.2f} | {back['gb_s']:.2f} | "
            f"{back['gb_s'] / limit['back']:.2f} | {out['rss_mib']:.0f} / {back['rss_mib']:.0f} | "
            f"{out['cached_mib']:.0f} / {back['cached_mib']:.0f} |"
        )
    return [*lines, "", *verdict(results), ""]


def verdict(results: dict[str, Any]) -> list[str]:
    """Say for each direction whether the target was met, and how ours stands to the fastest other durable way."""
    lines, limit = [], limits_of(results)
    for direction in ("out", "back"):
        rates = {
            name: figures[direction]["gb_s"]
            for name, figures in results.items()
            if direction in figures and not name.startswith("raw") and name not in NOT_ON_DISK
        }
        ours = rates.get("ours")
        others = {name: rate for name, rate in rates.items() if not name.startswith("ours")}
        if ours is None or not others:
            continue
        best = max(others, key=lambda name: others[name])
        met = "met" if ours / limit[direction] >= TARGET else "missed"
        lines.append(
            f"{direction}: ours at {ours / limit[direction]:.2f} of the limit, target {TARGET} {met}; fastest other "
            f"{best}, ours / it = {ours / others[best]:.2f}"
        )
    return lines


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument(
        "--total", type=parse_bytes, default=1 << 30, help="bytes of all ranks together"
    )
    parser.add_argument("--chunk", type=parse_bytes, default=64 * MIB)
    parser.add_argument("--ranks", default="1,8")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--ways",
        default=",".join(name for name in WAYS if "saver" not in name and name != "kvikio"),
    )
    parser.add_argument("--also", default="", help="further ways, after --ways")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path, help="draw the tables there")
    options = parser.parse_args(arguments)
    # A comma may stand in a name, so names are matched and not split.
    text = f"{options.ways},{options.also}"
    options.ways = [name for name in WAYS if f",{name}," in f",{text},"]
    return options


def main() -> None:
    options = options_of(sys.argv[1:])
    facts = describe_path(options.folder)
    report: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "disk": facts.why,
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
        "torch": torch.__version__,
        "total_bytes": options.total,
        "chunk_bytes": options.chunk,
        "ranks": {},
    }
    print(
        f"{report['machine']}; {report['device']}; torch {report['torch']}; {report['disk']}; {format_bytes(options.total)}\n"
    )
    printed: list[str] = []
    for count in [int(word) for word in options.ranks.split(",")]:
        folder = Path(tempfile.mkdtemp(prefix="offload-bench-", dir=options.folder))
        load = os.getloadavg()[0]
        try:
            report["ranks"][count] = measure(options, count, folder)
        finally:
            shutil.rmtree(folder)
        lines = table(report["ranks"][count], count)
        loads = f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after"
        print("\n".join([*lines, loads, ""]), flush=True)
        printed += lines
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.svg is not None:
        page = "\n".join([f"## {report['device']}", *printed])
        options.svg.write_text(draw(panels_of_page(page)), encoding="utf-8")


if __name__ == "__main__":
    main()
