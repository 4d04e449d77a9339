"""The way to the dashboard of a running job: an ssh tunnel to the head node, where it listens on loopback alone.

Only reads the run folder; knows neither Ray nor whether ssh may reach the node.
"""

import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from miles_hpc.errors import QueueError
from miles_hpc.paths import RunDir
from miles_hpc.run.resume import read_object


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunnel:
    """How to reach a dashboard.

    Attributes:
        argv: the ssh command; empty when the job runs on this machine.
        url: what to open in a browser while the tunnel stands.
        token: file with the token that the dashboard asks for.
    """

    argv: tuple[str, ...]
    url: str
    token: Path

    @property
    def command(self) -> str:
        """The ssh command as a person pastes it into a shell."""
        return shlex.join(self.argv)


def find_tunnel(run: RunDir) -> Tunnel:
    """Return the tunnel to the dashboard of the attempt that runs.

    Raises:
        QueueError: if no attempt runs, or its job has no dashboard.
    """
    attempt = max(run.attempts(), key=lambda entry: entry.number, default=None)
    resolved = None if attempt is None else read_object(attempt.resolved)
    identity = None if attempt is None else read_object(attempt.identity)
    if attempt is None or resolved is None or identity is None or attempt.verdict.exists():
        raise QueueError(
            f"{run.root}: found no running attempt whose Ray is up; expected one. Look at `miles-hpc status {shlex.quote(str(run.root))}`."
        )
    port = resolved.get("dashboard_port")
    if not isinstance(port, int):
        raise QueueError(
            f"{run.root}: found a job without dashboard; expected one that was asked for. Set agent.dashboard = true in the spec "
            "and submit it again."
        )
    node = str(identity["head_node"])
    ssh = ("ssh", "-N", "-L", f"127.0.0.1:{port}:127.0.0.1:{port}", "--", node)
    return Tunnel(
        argv=() if identity.get("cluster") == "local" else ssh,
        url=f"http://127.0.0.1:{port}",
        token=attempt.rendezvous / "ray_token",
    )


def open_tunnel(tunnel: Tunnel) -> None:
    """Become the ssh command; returns only when there is none to run.

    Raises:
        QueueError: if there is no ssh here.
    """
    if not tunnel.argv:
        return
    program = shutil.which(tunnel.argv[0])
    if program is None:
        raise QueueError(
            f"attach: found no {tunnel.argv[0]} on PATH; expected OpenSSH's client. Run `{tunnel.command}` where there is one."
        )
    os.execv(program, tunnel.argv)
