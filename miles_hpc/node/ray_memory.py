"""What Ray is told of a node's memory: what is left to this job there, never the machine's.

Pure; reads nothing.
"""

from dataclasses import dataclass

from miles_hpc.handoff import Handoff

LEAST_STORE_BYTES = 75 << 20
"""The smallest object store that Ray starts with (OBJECT_STORE_MINIMUM_MEMORY_BYTES of ray_constants.py)."""
LEAST_WORKER_BYTES = 64 << 20
"""Below it not one worker process starts."""
STORE_FRACTION = 0.3
"""Largest part of the node's share that the object store gets, which is Ray's own default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayMemory:
    """Bytes of Ray's resource `memory` and of its object store on one node; together the node's share."""

    workers: int
    store: int


def share_bytes(handoff: Handoff, left_bytes: int) -> int:
    """Return what one node of the job may take: what is left, at most what was asked for; local nodes share one machine."""
    share = left_bytes // handoff.num_nodes if handoff.cluster == "local" else left_bytes
    return share if handoff.memory_bytes is None else min(share, handoff.memory_bytes)


def store_bytes(handoff: Handoff, left_bytes: int) -> int:
    """Return the size of the object store: the plan's, or less where the share is small."""
    part = int(share_bytes(handoff, left_bytes) * STORE_FRACTION)
    return max(LEAST_STORE_BYTES, min(handoff.object_store_bytes, part))


def ray_memory(handoff: Handoff, left_bytes: int) -> RayMemory:
    """Return how the node's share is divided; preflight has seen that it is enough."""
    store = store_bytes(handoff, left_bytes)
    workers = max(LEAST_WORKER_BYTES, share_bytes(handoff, left_bytes) - store)
    return RayMemory(workers=workers, store=store)
