"""Who is in a Ray cluster: `python -m miles_hpc.probe.ray_watch NUM_NODES` prints a JSON line at each change.

    {"nodes": [{"index": 0, "alive": true, "cpus": 8.0, "gpus": 4.0, "why": ""}, ...]}

The address of the GCS is the first line of its standard input, so it can import Ray while the GCS still starts.
It asks the GCS directly (below a millisecond a call) and never joins the cluster, so it costs no worker and no object store.
Nodes are told apart by their resource `miles_hpc_node_<i>`, never by address. Ends when the GCS stays silent or when its
parent is gone.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field

from ray._raylet import GcsClient  # type: ignore[attr-defined]  # the stub leaves it out
from ray.exceptions import RayError

_NODE_RESOURCE = "miles_hpc_node_"
# Quick until everybody has joined, then only to notice a death.
_JOINING_POLL_S = 0.05
_WATCHING_POLL_S = 0.1
_SILENCE_S = 15.0
_ALIVE = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """What Ray says of one node of the job; `why` is the cause of death."""

    index: int
    alive: bool
    cpus: float
    gpus: float
    why: str


@dataclass(slots=True)
class Membership:
    """The nodes seen so far; a dead node's record has lost its resources, so its index is remembered."""

    client: GcsClient
    index_of: dict[bytes, int] = field(default_factory=dict)

    def snapshot(self) -> list[RayNode]:
        """Return the job's nodes, sorted by index; a node that died stays dead, whoever announces its index later."""
        found: dict[int, RayNode] = {}
        for info in self.client.get_all_node_info(timeout=5).values():
            resources = dict(info.resources_total)
            for name in resources:
                suffix = name.removeprefix(_NODE_RESOURCE)
                if name.startswith(_NODE_RESOURCE) and suffix.isdecimal():
                    self.index_of[info.node_id] = int(suffix)
            index = self.index_of.get(info.node_id)
            if index is None or (index in found and not found[index].alive):
                continue
            alive = info.state == _ALIVE
            found[index] = RayNode(
                index=index,
                alive=alive,
                cpus=resources.get("CPU", 0.0),
                gpus=resources.get("GPU", 0.0),
                why="" if alive else str(info.death_info.reason_message),
            )
        return [found[index] for index in sorted(found)]


def watch(address: str, num_nodes: int) -> int:
    """Print a line at each change until the GCS is silent; return the exit code."""
    parent = os.getppid()
    membership = Membership(GcsClient(address=address))
    last: list[RayNode] = []
    heard_s = time.monotonic()
    while os.getppid() == parent:
        try:
            nodes = membership.snapshot()
        except (RayError, OSError, RuntimeError) as error:
            if time.monotonic() - heard_s > _SILENCE_S:
                sys.stderr.write(f"no answer from the GCS at {address}: {error}\n")
                return 1
            time.sleep(_WATCHING_POLL_S)
            continue
        heard_s = time.monotonic()
        if nodes != last:
            last = nodes
            sys.stdout.write(json.dumps({"nodes": [asdict(node) for node in nodes]}) + "\n")
            sys.stdout.flush()
        joining = sum(1 for node in nodes if node.alive) < num_nodes
        time.sleep(_JOINING_POLL_S if joining else _WATCHING_POLL_S)
    return 0


if __name__ == "__main__":
    # No line means that the parent is gone or never got a GCS.
    gcs_address = sys.stdin.readline().strip()
    sys.exit(watch(gcs_address, int(sys.argv[1])) if gcs_address else 0)
