"""Stacks of this process on request, from within: registered at the start of every Python of the job (`python_start`).

faulthandler's own handler writes them, also while Python waits inside a library. The node's agent sends the signal, and only
to a process that catches it. Imports as little as it can, since every Python start pays for it. Knows no run folder.
"""

import faulthandler
import os
import signal

STACK_SIGNAL = signal.SIGRTMIN + 7
"""A signal that neither Slurm, Ray, NCCL nor Python uses; USR1 and USR2 are libraries' own."""


def stack_file(temp: str, pid: int) -> str:
    """Return the path of the file into which process `pid`, whose TMPDIR is `temp`, writes its stacks."""
    return f"{temp}/stacks-{pid}.txt"


def register_stacks() -> None:
    """Have the stacks of all threads written to `stack_file` at each STACK_SIGNAL; a handler that is there stays.

    A process that cannot make the file goes on without: only a hang would need it.
    """
    if signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL and _register():
        os.register_at_fork(after_in_child=_register)


def _register() -> bool:
    try:
        path = stack_file(os.environ["TMPDIR"], os.getpid())
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        faulthandler.register(STACK_SIGNAL, file=os.open(path, flags, 0o600), all_threads=True)
    except (OSError, KeyError, RuntimeError):
        return False
    return True
