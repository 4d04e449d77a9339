"""LD_PRELOAD of the processes that use NCCL: torch_memory_saver first, then NCCL, then what the site preloads.

The memory saver wraps allocations, so it must be found before everything else; NCCL must be found before the copy that torch
brings; the site's libraries (XALT, jemalloc) come last and stay in every process of the job. Pure; knows no process.
"""

import re
from collections.abc import Iterable

# ld.so takes both; an empty entry is none.
_SEPARATORS = re.compile(r"[ :]+")
_OURS = ("libnccl.so", "torch_memory_saver")


def split_preload(value: str) -> tuple[str, ...]:
    """Return the libraries of an LD_PRELOAD value, in order."""
    return tuple(entry for entry in _SEPARATORS.split(value) if entry)


def site_preload(value: str) -> str:
    """Return `value` without NCCL libraries and memory savers: those the job decides, whatever a shell preloads."""
    entries = split_preload(value)
    return ":".join(entry for entry in entries if not _is_ours(entry))


def merge_preload(*, memory_saver: str | None, nccl: str | None, site: str) -> str:
    """Return the LD_PRELOAD of a process that uses NCCL; each library once."""
    chosen: Iterable[str | None] = (memory_saver, nccl, *split_preload(site_preload(site)))
    return ":".join(dict.fromkeys(entry for entry in chosen if entry))


def _is_ours(entry: str) -> bool:
    name = entry.rpartition("/")[2]
    return any(name.startswith(mark) for mark in _OURS)
