"""The small files by which the nodes of one attempt find each other; each appears whole, by an atomic rename.

    head.json        where the head is                    ray_token   what a process needs to talk to this Ray, mode 0600
    report-NODE.json what a node's checks found           loaded      drop the page cache now
    failed-NODE.json a node that cannot go on
    stop.json        the head's verdict: end now          gone-NODE   this node has stopped its Ray
    stacks_wanted    the driver hangs: say where you are  stacks-NODE this node has said so

Knows the files, not what their readers do.
"""

import contextlib
import json
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from miles_hpc.run.node_report import NodeReport, read_node_report
from miles_hpc.run.resume import read_object, write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAddress:
    """head.json.

    Attributes:
        attempt: key of the execution (job id and restart count) that wrote it.
        host: the head's IPv4 address.
        gcs_port: of Ray's GCS; None in an attempt that only looks.
        reach_port: where a node proves that it reaches the head (`node.reach`).
        host_identity: of the head's host (`node.network.host_identity`).
    """

    attempt: str
    node: str
    host: str
    gcs_port: int | None
    reach_port: int
    host_identity: str

    @property
    def ray_address(self) -> str:
        """host:port of Ray's GCS."""
        return f"{self.host}:{self.gcs_port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailure:
    """failed-NODE.json: why a node cannot go on.

    Attributes:
        kind: name of the exception class, or "Cancelled" when the node was told to stop by a signal.
        exit_code: the code that the job should end with.
    """

    node: str
    kind: str
    message: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """`attempts/N/rendezvous/`; every read returns None while there is nothing to read."""

    root: Path
    attempt_key: str

    @property
    def token(self) -> Path:
        """ray_token: the secret of this attempt's Ray."""
        return self.root / "ray_token"

    def open(self) -> None:
        """Make the folder and the token; called by the head before any other node looks."""
        self.root.mkdir(mode=0o755, exist_ok=True)
        write_whole(self.token, secrets.token_hex(32), mode=0o600)

    def read_token(self) -> str:
        """Return the secret of this attempt. Raises OSError."""
        return self.token.read_text(encoding="ascii")

    def close(self) -> None:
        """Remove the token; called by the head when its Ray is gone."""
        self.token.unlink(missing_ok=True)

    def publish_head(self, head: HeadAddress) -> None:
        """Tell the other nodes where the head is."""
        self._write("head.json", asdict(head))

    def head(self) -> HeadAddress | None:
        """Return the head's address; one from another attempt is none."""
        raw = read_object(self.root / "head.json")
        if raw is None or raw.get("attempt") != self.attempt_key:
            return None
        return HeadAddress(**raw)  # type: ignore[arg-type]

    def write_report(self, report: NodeReport) -> None:
        """Tell the head what this node's checks found."""
        write_whole(self.root / f"report-{report.node}.json", report.to_json())

    def report(self, node: str) -> NodeReport | None:
        """Return what the checks of `node` found, or None while it has not said so."""
        return read_node_report(self.root / f"report-{node}.json", self.attempt_key)

    def reported(self) -> frozenset[str]:
        """Return the nodes that have written a report, by one look at the folder."""
        names = (path.stem for path in self.root.glob("report-*.json"))
        return frozenset(name.removeprefix("report-") for name in names)

    def report_failure(self, failure: NodeFailure) -> None:
        """Tell the head that this node cannot go on."""
        self._write(f"failed-{failure.node}.json", asdict(failure))

    def failures(self) -> tuple[NodeFailure, ...]:
        """Return the failures that nodes have reported, sorted by node."""
        found = []
        for path in sorted(self.root.glob("failed-*.json")):
            raw = read_object(path)
            if raw is not None:
                found.append(NodeFailure(**raw))  # type: ignore[arg-type]
        return tuple(found)

    def announce_loaded(self) -> None:
        """Tell every node that the driver has loaded the model."""
        self._write("loaded", {"time_s": time.time()})

    def is_loaded(self) -> bool:
        """Say whether the driver has loaded the model."""
        return (self.root / "loaded").exists()

    def announce_stop(self, state: str, reason: str) -> None:
        """Tell every node that the attempt ends, and why."""
        self._write("stop.json", {"state": state, "reason": reason, "time_s": time.time()})

    def is_stopped(self) -> bool:
        """Say whether the head has decided that the attempt ends."""
        return (self.root / "stop.json").exists()

    def want_stacks(self, reason: str) -> None:
        """Ask every node where its processes stand."""
        self._write("stacks_wanted", {"reason": reason, "time_s": time.time()})

    def wants_stacks(self) -> bool:
        """Say whether the head wants to know where this node's processes stand."""
        return (self.root / "stacks_wanted").exists()

    def announce_stacks(self, node: str) -> None:
        """Tell the head that the stacks of `node` are written."""
        self._write(f"stacks-{node}", {"time_s": time.time()})

    def have_stacks(self) -> frozenset[str]:
        """Return the nodes whose stacks are written."""
        return frozenset(path.name.removeprefix("stacks-") for path in self.root.glob("stacks-*"))

    def announce_gone(self, node: str) -> None:
        """Tell the head that `node` has stopped its Ray."""
        self._write(f"gone-{node}", {"time_s": time.time()})

    def gone(self) -> frozenset[str]:
        """Return the nodes that have stopped their Ray."""
        return frozenset(path.name.removeprefix("gone-") for path in self.root.glob("gone-*"))

    def _write(self, name: str, content: dict[str, object]) -> None:
        write_whole(self.root / name, json.dumps(content) + "\n")


def report_failure_if_possible(rendezvous: Rendezvous, failure: NodeFailure) -> None:
    """Report `failure`; a run folder that cannot be written leaves only this agent's own exit code to tell it."""
    with contextlib.suppress(OSError):
        rendezvous.report_failure(failure)
