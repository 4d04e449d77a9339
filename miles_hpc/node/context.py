"""What every part of one node agent shares: the job it serves, the attempt it works on and where it reports.

Holds references only; decides nothing.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from miles_hpc.handoff import Handoff
from miles_hpc.node.rendezvous import Rendezvous
from miles_hpc.node.supervise import StopRequest
from miles_hpc.paths import AttemptDir, RunDir
from miles_hpc.run.events import EventLog
from miles_hpc.secret_store import Redaction
from miles_hpc.slurm import NodeIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """One agent's view of its job; made once, never changed."""

    run: RunDir
    handoff: Handoff
    identity: NodeIdentity
    attempt: AttemptDir
    rendezvous: Rendezvous
    events: EventLog
    stop: StopRequest
    redaction: Redaction = field(default_factory=Redaction)

    @property
    def node(self) -> str:
        """Name of this node."""
        return self.identity.node

    @property
    def is_head(self) -> bool:
        """This node runs Ray's head and the driver."""
        return self.identity.is_head

    @property
    def job_tag(self) -> str:
        """Marks every process of this job on this node; nodes that share a host have different tags."""
        identity = self.identity
        # Two clusters that share a host count their jobs alike; their run folders differ.
        run = hashlib.sha256(str(self.run.root).encode(errors="surrogateescape")).hexdigest()[:8]
        number = f"{identity.job_id}.{identity.restart_count}.{self.attempt.number}"
        return f"{number}.{run}.{identity.node}"

    @property
    def log(self) -> Path:
        """This node's log in the attempt folder."""
        return self.attempt.node_log(self.node)
