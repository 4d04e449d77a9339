"""events.jsonl: what happened, one JSON object a line, from every process of a run.

Each process appends whole lines to its node's own file (appends from several hosts to one file are unsafe on NFS); the
head alone merges them. Knows the closed set of kinds, not what leads to them.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import cast

from miles_hpc.run.json_lines import append_json_line, read_json_lines

FieldValue = str | int | float | bool | None | list[str] | list[int] | list[float]


class Kind(StrEnum):
    """Every kind of event; a reader may rely on this set."""

    ATTEMPT_STARTED = "attempt_started"
    PREFLIGHT = "preflight"
    SCRATCH = "scratch"
    NCCL = "nccl"
    RAY_STARTED = "ray_started"
    NODE_JOINED = "node_joined"
    CLUSTER_READY = "cluster_ready"
    DRIVER_STARTED = "driver_started"
    DRIVER_EXITED = "driver_exited"
    PAGE_CACHE_DROPPED = "page_cache_dropped"
    MEMORY_ALARM = "memory_alarm"
    OOM_KILL = "oom_kill"
    HANG = "hang"
    NODE_FAILED = "node_failed"
    TEARDOWN = "teardown"
    ATTEMPT_ENDED = "attempt_ended"
    PHASE = "phase"
    STEP = "step"
    OFFLOAD = "offload"
    ONLOAD = "onload"
    WEIGHT_SYNC = "weight_sync"
    NCCL_PROOF = "nccl_proof"
    MODEL_LOADED = "model_loaded"
    CHECKPOINT_SAVED = "checkpoint_saved"
    CHECKPOINT_LOADED = "checkpoint_loaded"
    SAVE_REQUESTED = "save_requested"
    STOPPED_ON_REQUEST = "stopped_on_request"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class EventLog:
    """The events file of one node; several processes of that node may append to it."""

    path: Path
    node: str

    def append(self, kind: Kind, /, **fields: FieldValue) -> None:
        """Append one event, stamped now, by a single write; raises OSError when the file cannot be written."""
        stamp = {"time_s": time.time(), "node": self.node, "kind": kind.value}
        append_json_line(self.path, {**stamp, **fields})


def read_events(path: Path) -> Iterator[dict[str, FieldValue]]:
    """Yield the events of a file, oldest first; a half-written last line is left out."""
    for event in read_json_lines(path):
        if "kind" in event:
            yield cast("dict[str, FieldValue]", event)
