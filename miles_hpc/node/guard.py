"""The process above the agent: passes signals on, and cleans up when the agent itself is killed.

    scheduler -> guard (this process) -> agent (a session of its own) -> Ray, driver

The kernel's memory killer, or a scheduler's SIGKILL to one process, would otherwise leave Ray running: the guard adopts what
the agent leaves behind and ends it. If the guard is killed instead, the kernel tells the agent, which tears down in order.
Knows of the job only what the agent has left word of.
"""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

from miles_hpc.errors import NodeError
from miles_hpc.node.host_memory import watch_oom_kills
from miles_hpc.node.rendezvous import NodeFailure, Rendezvous
from miles_hpc.node.supervise import become_subreaper, fork_into_own_session
from miles_hpc.node.survivors import end_survivors
from miles_hpc.paths import AttemptDir
from miles_hpc.run.cause import Cause, Finding
from miles_hpc.run.events import EventLog, Kind
from miles_hpc.run.resume import Verdict, read_verdict, write_verdict

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SURVIVOR_GRACE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What the agent leaves word of, for the case that it is killed."""

    node: str
    is_head: bool
    attempt_root: str
    attempt_key: str
    job_tag: str
    folders: tuple[str, ...]


@dataclass(slots=True)
class WordPipe:
    """The pipe from the agent to its guard; the last word counts."""

    read_end: int
    write_end: int
    said: bytes = field(default=b"")

    def leave(self, word: Word) -> None:
        """Replace what was left before."""
        os.write(self.write_end, json.dumps(asdict(word)).encode() + b"\n")

    def last(self) -> Word | None:
        """Return the last word, or None when the agent left none."""
        os.set_blocking(self.read_end, False)
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.read_end, 65536):
                self.said += chunk
        lines = self.said.splitlines()
        if not lines:
            return None
        raw = json.loads(lines[-1])
        return Word(**{**raw, "folders": tuple(raw["folders"])})


def guard(serve: Callable[[Callable[[Word], None]], int]) -> int:
    """Run `serve` in a child and return its exit code; if it is killed, clean up and return NodeError's code."""
    become_subreaper()
    oom = watch_oom_kills(os.environ.get("SLURM_JOB_ID", ""))
    pipe = WordPipe(*os.pipe())
    # Until the child has its own handlers, a signal must neither be lost nor end the guard.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    agent = fork_into_own_session()
    if agent == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        return serve(pipe.leave)
    os.close(pipe.write_end)
    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN or number is not signal.SIGHUP:
            signal.signal(number, _forward_to(agent))
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    code = _wait(agent)
    if code >= 0:
        return code
    word = pipe.last()
    if word is not None:
        _clean_up(word, -code, oom.evidence())
    return NodeError.exit_code


def _forward_to(agent: int) -> Callable[[int, FrameType | None], None]:
    def forward(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, number)

    return forward


def _wait(agent: int) -> int:
    """Return the agent's exit code, negative for a signal; collect adopted orphans meanwhile."""
    while True:
        pid, status = os.wait()
        if pid == agent:
            return os.waitstatus_to_exitcode(status)


def _clean_up(word: Word, signal_number: int, oom_kill: str | None) -> None:
    """Do what the agent can no longer do: tell the others, end what is left, remove the folders."""
    attempt = AttemptDir(Path(word.attempt_root))
    found = Finding(Cause.NODE_FAILURE, f"{word.node}: agent killed by signal {signal_number}")
    if oom_kill is not None:
        found = Finding(Cause.HOST_OOM, f"{word.node}: {oom_kill}")
        with contextlib.suppress(OSError):
            events = EventLog(attempt.node_events(word.node), word.node)
            events.append(Kind.OOM_KILL, message=oom_kill)
    rendezvous = Rendezvous(attempt.rendezvous, word.attempt_key)
    reason = (
        f"{word.node}: the node agent was killed by signal {signal_number}; expected it to run as long as the job. "
        "Look for the kernel's memory killer (dmesg, cluster.mem) and at who sent the signal."
    )
    failure = NodeFailure(
        node=word.node, kind=NodeError.__name__, message=reason, exit_code=NodeError.exit_code
    )
    with contextlib.suppress(OSError):
        if word.is_head:
            rendezvous.announce_stop("FAILED", reason)
        else:
            rendezvous.report_failure(failure)
    end_survivors(word.job_tag, (), grace_s=_SURVIVOR_GRACE_S)
    for folder in word.folders:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        rendezvous.announce_gone(word.node)
        if word.is_head:
            rendezvous.close()
            if read_verdict(attempt) is None:
                verdict = Verdict(
                    state="FAILED",
                    exit_code=NodeError.exit_code,
                    driver_exit_code=None,
                    reason=reason,
                    ended_s=time.time(),
                    cause=found.cause.value,
                    evidence=found.evidence,
                )
                write_verdict(attempt, verdict)
