"""While the driver runs: who dies, who asks for the end, and when the page cache can go.

`watch_head` ends with the attempt's outcome; `watch_worker` ends when the head has decided or this node cannot go on.
Starts and stops nothing itself.
"""

import time
from collections.abc import Mapping

from miles_hpc.errors import DriverError, NodeError
from miles_hpc.node.context import NodeContext
from miles_hpc.node.hang import HangWatch, answer_stacks
from miles_hpc.node.merge import EventMerge
from miles_hpc.node.network import is_reachable
from miles_hpc.node.page_cache import PageCache
from miles_hpc.node.ray_cluster import (
    Membership,
    RaySettings,
    raise_if_ended,
    raise_if_node_failed,
)
from miles_hpc.node.save_and_stop import watch_saves
from miles_hpc.node.supervise import POLL_S, Child, reap_orphans

# A node's own report of why it left says more than Ray's; it comes at most that much later.
_REPORT_GRACE_S = 2.0
_HOUSEKEEPING_S = 0.25
_HEAD_CHECK_S = 2.0
_HEAD_SILENCE_S = 20.0


def watch_head(
    context: NodeContext,
    settings: RaySettings,
    children: Mapping[str, Child],
    membership: Membership,
    merge: EventMerge,
) -> None:
    """Return when the driver has ended with 0.

    Raises:
        MilesHpcError: if the driver failed, a node left or failed, Ray ended, a signal asked for the end, or the driver was
            asked to save and stop and has done so or had its time.
    """
    driver, ray = children["driver"], children["ray"]
    cache = PageCache(context)
    saves = watch_saves(context, merge.pace)
    hang = watch_hang(context, settings, merge)
    due_s = 0.0
    while True:
        context.stop.raise_if_requested()
        code = driver.poll()
        if code is not None:
            merge.run_once()
            saves.look(code)
        raise_if_node_lost(
            context, membership, wait_s=0.0 if code in (None, 0) else _REPORT_GRACE_S
        )
        if code is not None:
            raise_if_driver_failed(context, driver, code)
            return
        raise_if_ended(context, settings, ray)
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + _HOUSEKEEPING_S
            reap_orphans(tuple(children.values()))
            merge.run_once()
            saves.look(None)
            hang.look()
            if merge.pace.is_loaded and not context.rendezvous.is_loaded():
                context.rendezvous.announce_loaded()
            cache.drop_when_loaded()
        time.sleep(POLL_S)


def watch_hang(context: NodeContext, settings: RaySettings, merge: EventMerge) -> HangWatch:
    """Return the watch for a silent driver, which knows how long earlier attempts' phases took."""
    merge.silence.learn(context.run.events)
    floor_s = context.handoff.hang_after_s
    return HangWatch(context, merge.silence, floor_s=floor_s, temp=settings.temp / "tmp")


def raise_if_node_lost(context: NodeContext, membership: Membership, *, wait_s: float) -> None:
    """Raise if a node has left Ray or reported a failure; look for `wait_s` seconds before saying that none has.

    A driver that fails because an actor's node died often ends before that death is known.
    """
    end_s = time.monotonic() + wait_s
    lost_s: float | None = None
    while True:
        raise_if_node_failed(context)
        membership.refresh()
        dead = membership.dead()
        if dead and lost_s is None:
            lost_s = time.monotonic()
            end_s = lost_s + _REPORT_GRACE_S
        if time.monotonic() >= end_s:
            break
        time.sleep(POLL_S)
    if dead:
        named = ", ".join(f"{context.identity.nodes[node.index]} ({node.why})" for node in dead)
        raise NodeError(
            f"nodes left Ray while the driver ran: {named}; expected every node to stay until the end. "
            f"Look at their logs in {context.attempt.root}."
        )
    probe_code = membership.probe.poll()
    if probe_code is not None:
        raise NodeError(
            f"{context.node}: the watch over Ray's nodes ended with code {probe_code}; expected it to run as long as the "
            f"job. Its log {membership.probe.log} ends:\n{membership.probe.log_tail(5)}"
        )


def raise_if_driver_failed(context: NodeContext, driver: Child, code: int) -> None:
    """Raise DriverError, with the end of its log, unless `code` is 0."""
    if code == 0:
        return
    how = f"exit code {code}" if code > 0 else f"signal {-code}"
    raise DriverError(
        f"{context.node}: driver ended with {how}; expected 0. Its log {driver.log} ends:\n{driver.log_tail()}"
    )


def watch_worker(
    context: NodeContext, settings: RaySettings, ray: Child, head_address: str
) -> None:
    """Return when the head has ended the attempt.

    Raises:
        MilesHpcError: if this node's Ray ended, the head is gone, or a signal asked for the end.
    """
    host, _, port = head_address.rpartition(":")
    cache = PageCache(context)
    heard_s = time.monotonic()
    due_s = heard_s + _HEAD_CHECK_S
    while not context.rendezvous.is_stopped():
        context.stop.raise_if_requested()
        raise_if_ended(context, settings, ray)
        cache.drop_when_loaded()
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + _HEAD_CHECK_S
            reap_orphans((ray,))
            answer_stacks(context, settings.temp / "tmp")
            if is_reachable(host, int(port), timeout_s=_HEAD_CHECK_S):
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > _HEAD_SILENCE_S:
                raise NodeError(
                    f"{context.node}: Ray on head node {context.identity.head_node} ({head_address}) has not answered "
                    f"for {_HEAD_SILENCE_S:g} s; expected it to run as long as the job. "
                    f"Look at {context.attempt.node_log(context.identity.head_node)}."
                )
        time.sleep(POLL_S)
