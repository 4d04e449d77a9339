"""Why an attempt ended: one cause of a closed set, with the one line that shows it.

Pure: judges what the head's agent has gathered (`node.exit_cause`) or what the scheduler says (`run.report`). A cause without
a line that shows it is `unknown`; nothing is guessed from an exit code alone.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Every cause that a verdict may name."""

    NONE = "none"
    HOST_OOM = "host_oom"
    GPU_OOM = "gpu_oom"
    DISK_FULL = "disk_full"
    NCCL = "nccl"
    RAY_BRING_UP = "ray_bring_up"
    NODE_FAILURE = "node_failure"
    PREFLIGHT = "preflight"
    TIME_LIMIT = "time_limit"
    PREEMPTION = "preemption"
    CANCELLED = "cancelled"
    HANG = "hang"
    USER_CODE = "user_code"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause and the line that shows it: where it stands, then what it says."""

    cause: Cause
    evidence: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.evidence}" if self.evidence else str(self.cause)


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The last lines of one log."""

    where: str
    lines: tuple[str, ...]


# In this order: memory or a disk that is used up makes peers fail in NCCL, and a node that is lost does so too.
_PATTERNS: tuple[tuple[Cause, re.Pattern[str]], ...] = (
    (
        Cause.GPU_OOM,
        re.compile(
            r"CUDA out of memory|torch\.(cuda\.)?OutOfMemoryError|CUDA error: out of memory"
            r"|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED"
        ),
    ),
    (
        Cause.HOST_OOM,
        re.compile(
            r"ray\.exceptions\.OutOfMemoryError|due to the node running low on memory|\bMemoryError\b"
            r"|std::bad_alloc|DefaultCPUAllocator: (can't allocate|not enough) memory|Cannot allocate memory"
            r"|oom[-_]kill event"
        ),
    ),
    (
        Cause.DISK_FULL,
        re.compile(r"No space left on device|Disk quota exceeded|OutOfDiskError"),
    ),
    (
        Cause.NCCL,
        re.compile(
            r"\bncclSystemError|\bncclInternalError|\bncclUnhandledCudaError|\bncclRemoteError|\bncclInvalidUsage"
            r"|\bNCCL error|DistBackendError|Watchdog caught collective operation timeout"
        ),
    ),
    (
        Cause.NODE_FAILURE,
        re.compile(r"NodeDiedError|[Nn]ode with node id: \S+ .*marked dead|the actor's node was"),
    ),
)
# An exception that only says that another process has ended: why is in that process's own log.
_SECOND_HAND = re.compile(
    r"ActorDiedError|RayActorError|ActorUnavailableError|WorkerCrashedError|LocalRayletDiedError|ObjectLostError"
    r"|OwnerDiedError|ChildFailedError"
)
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(\([\w.]+\))?(:\s.*)?")
_USUAL_NAME = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt|Timeout|Failure|Failed)\b")
# Ray puts the actor's name before a worker's line, in colour on a terminal.
_RAY_PREFIX = re.compile(r"^(\x1b\[[0-9;]*m)*\([^()]*pid=\d+[^()]*\)(\x1b\[[0-9;]*m)*\s?")
_MOST_EVIDENCE = 300


def last_exception(lines: Iterable[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return the line of the exception whose traceback stands last, with its traceback; None without one."""
    plain = [_RAY_PREFIX.sub("", line) for line in lines]
    starts = [number for number, line in enumerate(plain) if line.strip() == _TRACEBACK]
    if not starts:
        return None
    block = plain[starts[-1] :]
    named = [line for line in block[1:] if _EXCEPTION.fullmatch(line)]
    usual = [line for line in named if _USUAL_NAME.match(line)]
    if not named:
        return None
    # What the program prints after its traceback may look like an exception too.
    return (usual[-1] if usual else named[0]), tuple(block)


def find_in_logs(
    logs: Iterable[LogEnd], *, causes: frozenset[Cause] | None = None
) -> Finding | None:
    """Return the most basic cause that any line tells of; of one cause the first line counts."""
    found: dict[Cause, str] = {}
    for where, line in _lines_of(logs):
        for cause, pattern in _PATTERNS:
            if cause not in found and pattern.search(line):
                found[cause] = one_line(f"{where}: {line}")
    for cause, _ in _PATTERNS:
        if cause in found and (causes is None or cause in causes):
            return Finding(cause, found[cause])
    return None


def cause_of_driver_end(driver: LogEnd, others: Iterable[LogEnd], exit_code: int | None) -> Finding:
    """Return why a driver ended by itself with another code than 0.

    Its own last exception decides, unless that one only tells of something that broke elsewhere.
    """
    logs = (driver, *others)
    exception = last_exception(driver.lines)
    if exception is not None:
        line, block = exception
        own = find_in_logs((LogEnd(driver.where, block),))
        if own is not None or any(_SECOND_HAND.search(entry) for entry in block):
            deeper = find_in_logs(logs) or own
            return deeper or Finding(Cause.UNKNOWN, one_line(f"{driver.where}: {line}"))
        return Finding(Cause.USER_CODE, one_line(f"{driver.where}: {line}"))
    found = find_in_logs(logs)
    if found is not None:
        return found
    last = next((line for line in reversed(driver.lines) if line.strip()), "(no output)")
    if exit_code is not None and exit_code > 0:
        what = f"the driver ended with {exit_code}; its last line: {last}"
        return Finding(Cause.USER_CODE, one_line(f"{driver.where}: {what}"))
    how = "an unknown code" if exit_code is None else f"signal {-exit_code}"
    return Finding(
        Cause.UNKNOWN,
        one_line(f"{driver.where}: the driver ended by {how}; its last line: {last}"),
    )


# Source: "JOB STATE CODES" of the squeue manual.
_SLURM_WORDS = {
    "OUT_OF_MEMORY": Cause.HOST_OOM,
    "NODE_FAIL": Cause.NODE_FAILURE,
    "BOOT_FAIL": Cause.NODE_FAILURE,
    "TIMEOUT": Cause.TIME_LIMIT,
    "DEADLINE": Cause.TIME_LIMIT,
    "PREEMPTED": Cause.PREEMPTION,
    "CANCELLED": Cause.CANCELLED,
}


def cause_of_slurm_word(word: str, reason: str) -> Finding | None:
    """Return what Slurm's state of an ended job means; None where the state says nothing of the cause."""
    cause = _SLURM_WORDS.get(word.partition(" ")[0].rstrip("+"))
    if cause is None:
        return None
    return Finding(cause, f"Slurm: JobState={word}" + (f" Reason={reason}" if reason else ""))


def one_line(text: str) -> str:
    """Return `text` as one line of a length that a terminal can show."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_EVIDENCE else line[: _MOST_EVIDENCE - 3] + "..."


def _lines_of(logs: Iterable[LogEnd]) -> Iterator[tuple[str, str]]:
    for log in logs:
        for line in log.lines:
            yield log.where, _RAY_PREFIX.sub("", line)
