"""Every process of the job on this node that uses NCCL uses the pinned one, or the job ends with a word on which does not.

Two kinds of evidence: the word of the process itself, which `probe.nccl_hook` writes to the node's events, and the files that
it has mapped. Where the pinned file is the only NCCL in a process, nothing else can answer there; where another one is
mapped too, the word decides, and a process that does not give it has until a deadline. No engine takes part in it. Runs in a
thread of its own; the mapped files of a process are read only while it grows and nothing is settled.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from miles_hpc.errors import Fault, NodeError
from miles_hpc.handoff import NcclPin
from miles_hpc.node.context import NodeContext
from miles_hpc.node.host_memory import OwnProcesses
from miles_hpc.node.nccl import describe_code
from miles_hpc.node.sampling import NCCL_SHARE, Pace
from miles_hpc.probe.nccl_hook import mapped_nccl, process_role, start_ticks
from miles_hpc.process import run_short
from miles_hpc.run.events import Kind
from miles_hpc.run.json_lines import JsonLineTail

PROOF_DEADLINE_S = 15.0
"""From the first look that finds two NCCL libraries in a process until its word must be there."""
_LOOK_S = 0.005
_LONGEST_PAUSE_S = 10.0
_ASK_TIMEOUT_S = 60.0
_JOIN_S = 5.0
_FIX = (
    "Find what sets LD_PRELOAD or PYTHONPATH anew in that process, or starts Python with -I, -E or -S; "
    'nccl.on_mismatch = "warn" lets the job go on.'
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """One process: a pid is given out again, the pair is not."""

    pid: int
    start_ticks: int


@dataclass(slots=True)
class Seen:
    """What is known of a process.

    Attributes:
        num_pages: size of its address space at the last look; what maps a library grows.
        looked_s: when its mapped files were read.
        suspect_s: since when something about it is wrong or unproved.
        is_settled: nothing about it can change any more but by its own word.
    """

    num_pages: int = 0
    looked_s: float = 0.0
    suspect_s: float | None = None
    is_settled: bool = False


@dataclass(slots=True)
class NcclWatch:
    """Judges the processes of one node against the pin; `look` returns new faults."""

    pin: NcclPin
    library: Path
    node: str
    proofs: JsonLineTail
    processes: OwnProcesses
    ask_version: Callable[[str], int | None]
    proc: Path = Path("/proc")
    deadline_s: float = PROOF_DEADLINE_S
    _seen: dict[ProcessKey, Seen] = field(default_factory=dict)

    def look(self, now_s: float) -> tuple[Fault, ...]:
        """Return what is wrong with processes that nothing was said of yet, after a few milliseconds at most."""
        faults = self._listen()
        self._meet(self.processes.refresh())
        begin_s = time.thread_time()
        open_keys = [key for key, seen in self._seen.items() if not seen.is_settled]
        for key in sorted(open_keys, key=lambda key: self._seen[key].looked_s):
            fault = self._judge(key, self._seen[key], now_s)
            if fault is not None:
                self._seen[key].is_settled = True
                faults.append(fault)
            if time.thread_time() - begin_s > _LOOK_S:
                break
        return tuple(faults)

    def _listen(self) -> list[Fault]:
        """Judge the processes' new words, those of processes that have ended since among them."""
        faults = []
        for event in self.proofs.new():
            pid, ticks = event.get("pid"), event.get("start_ticks")
            if event.get("kind") != Kind.NCCL_PROOF or not isinstance(pid, int):
                continue
            if not isinstance(ticks, int):
                continue
            key = ProcessKey(pid, ticks)
            self._seen[key] = Seen(is_settled=True)
            fault = self._fault_of_word(key, event)
            if fault is not None:
                faults.append(fault)
        return faults

    def _meet(self, pids: frozenset[int]) -> None:
        """Note who is there now, and forget who has ended."""
        present = set()
        for pid in pids - {os.getpid()}:
            with contextlib.suppress(OSError, IndexError, ValueError):
                ticks = start_ticks((self.proc / str(pid) / "stat").read_bytes())
                present.add(ProcessKey(pid, ticks))
        self._seen = {key: self._seen.get(key) or Seen() for key in present}

    def _judge(self, key: ProcessKey, seen: Seen, now_s: float) -> Fault | None:
        folder = self.proc / str(key.pid)
        try:
            num_pages = int((folder / "statm").read_bytes().split()[0])
            if num_pages == seen.num_pages and seen.suspect_s is None:
                return None
            mapped = mapped_nccl((folder / "maps").read_text(errors="replace"))
        except (OSError, IndexError, ValueError):
            # It has just ended.
            return None
        seen.num_pages, seen.looked_s = num_pages, now_s
        if not mapped:
            seen.suspect_s = None
            return None
        others = tuple(name for name in mapped if not self._is_pinned(name))
        if not others:
            seen.is_settled = True
            return None
        if seen.suspect_s is None:
            # A process between fork and exec still has its parent's libraries.
            seen.suspect_s = now_s
            return None
        has_pinned = len(others) < len(mapped)
        if has_pinned and now_s - seen.suspect_s < self.deadline_s:
            return None
        return self._fault(key, others[0], has_pinned=has_pinned)

    def _is_pinned(self, name: str) -> bool:
        path = Path(name)
        with contextlib.suppress(OSError):
            return path.samefile(self.library)
        return path == self.library

    def _fault_of_word(self, key: ProcessKey, word: Mapping[str, object]) -> Fault | None:
        code, library = word.get("version_code"), word.get("library")
        if code == self.pin.version_code and isinstance(library, str) and self._is_pinned(library):
            return None
        name = library if isinstance(library, str) else None
        role = word.get("role") if isinstance(word.get("role"), str) else "?"
        return self._fault(key, name, code if isinstance(code, int) else None, role=role)

    def _fault(
        self,
        key: ProcessKey,
        library: str | None,
        code: int | None = None,
        *,
        has_pinned: bool = False,
        role: object = "?",
    ) -> Fault:
        if library is None:
            found = "no NCCL that its calls reach"
        else:
            code = self.ask_version(library) if code is None else code
            version = "an unknown version" if code is None else describe_code(code)
            found = f"{version} from {library}"
        if has_pinned:
            found += (
                " beside the pinned library, and no word of the process on which of them answers"
            )
        return Fault(
            where=f"{self.node}: NCCL of pid {key.pid} ({self._role(key.pid) or role})",
            found=found,
            expected=f"{describe_code(self.pin.version_code)} from {self.library}",
            fix=_FIX,
        )

    def _role(self, pid: int) -> str | None:
        """Return what the process is now, which a title that it has given itself tells best; None when it has ended."""
        try:
            text = (self.proc / str(pid) / "cmdline").read_text(errors="replace")
        except OSError:
            return None
        argv = [part for part in text.split("\0") if part]
        return process_role(argv) if argv else None


@dataclass(slots=True)
class NcclWatcher:
    """Runs the watch in a thread and acts on what it finds."""

    context: NodeContext
    watch: NcclWatch
    pace: Pace = field(default_factory=lambda: Pace(NCCL_SHARE))
    _end: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Look until `stop`; what cannot be written is said once in the log and ends the watch, never the job."""
        try:
            while not self._end.is_set():
                self.look(time.monotonic())
                self._end.wait(min(_LONGEST_PAUSE_S, self.pace.due_s - time.monotonic()))
        except OSError as error:
            log.warning("NCCL is no longer watched: %s", error)
        log.info("watching NCCL took %.3f s of a core", self.pace.cpu_s)

    def look(self, now_s: float) -> None:
        """Look once, and say or do what the pin demands of what was found."""
        begin_s = time.thread_time()
        faults = self.watch.look(now_s)
        self.pace.charge(now_s, time.thread_time() - begin_s)
        if not faults:
            return
        found = "\n".join(str(fault) for fault in faults)
        if self.watch.pin.on_mismatch == "fail":
            self.context.stop.end_because(NodeError(found))
            return
        log.warning("%s", found)
        self.context.events.append(Kind.WARNING, message=found)

    def stop(self) -> None:
        """End the loop at its next look."""
        self._end.set()


def make_watch(
    context: NodeContext, pin: NcclPin, library: Path, environ: Mapping[str, str]
) -> NcclWatch:
    """Return the watch of this agent's node; `environ` is that of the job's processes."""

    def ask_version(path: str) -> int | None:
        argv = [context.handoff.python, "-m", "miles_hpc.probe.interpreter", path]
        done = run_short(argv, timeout_s=_ASK_TIMEOUT_S, environ=environ)
        try:
            code = json.loads(done.stdout)["nccl_code"]
        except (ValueError, KeyError, TypeError):
            return None
        return code if isinstance(code, int) else None

    return NcclWatch(
        pin=pin,
        library=library,
        node=context.node,
        proofs=JsonLineTail(context.events.path),
        processes=OwnProcesses(os.getpid()),
        ask_version=ask_version,
    )


@contextmanager
def watching_nccl(
    context: NodeContext, library: Path | None, environ: Mapping[str, str]
) -> Iterator[None]:
    """Watch in a thread until the block ends; a job without a pin has nothing to watch."""
    pin = context.handoff.nccl
    if pin is None or not pin.preload or library is None:
        yield
        return
    watcher = NcclWatcher(context, make_watch(context, pin, library, environ))
    thread = threading.Thread(target=watcher.run, name="nccl", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watcher.stop()
        thread.join(_JOIN_S)
    if not thread.is_alive():
        # The words of processes that have just ended.
        watcher.look(time.monotonic())
    if context.stop.error is not None:
        raise context.stop.error
