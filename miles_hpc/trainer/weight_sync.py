"""From the trainer's adapter to every rollout engine, with proof that all of them use the same bytes.

Knows the fleets and the adapter's PEFT form, not how either side stores it.
"""

import time
from dataclasses import dataclass

import ray

from miles_hpc.errors import DriverError
from miles_hpc.trainer.calls import Fleet
from miles_hpc.trainer.rollout import AdapterConfig, PeftState, digest_adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncedWeights:
    """One weight sync; `version` is the number of steps behind the adapter."""

    version: int
    size_bytes: int
    num_tensors: int
    digest: str
    seconds: float


def sync_weights(
    engines: Fleet, state: PeftState, config: AdapterConfig, version: int, *, deadline_s: float
) -> SyncedWeights:
    """Load `state` as `version` into all engines.

    Raises:
        DriverError: if an engine fails, or reports another digest than that of `state`.
    """
    started = time.monotonic()
    digest = digest_adapter(state)
    shared = ray.put(dict(state))
    reported = engines.call("load_adapter", shared, config, version, deadline_s=deadline_s)
    wrong = [
        f"{member}: {found[:12]}"
        for member, found in zip(engines.members, reported, strict=True)
        if found != digest
    ]
    if wrong:
        raise DriverError(
            f"driver, weight sync {version}: found digests {', '.join(wrong)}; expected {digest[:12]} on every engine. "
            "The weights were changed on their way; report this with the attempt's logs."
        )
    return SyncedWeights(
        version=version,
        size_bytes=sum(tensor.nbytes for tensor in state.values()),
        num_tensors=len(state),
        digest=digest,
        seconds=time.monotonic() - started,
    )
