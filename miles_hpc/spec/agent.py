"""[agent]: what a spec may say of the node agent.

Holds the table alone; `spec.job` puts it into the job spec.
"""

from typing import Literal

from miles_hpc.spec.fields import Deadline, Duration, PositiveSize, Table
from miles_hpc.units import Seconds


class AgentTable(Table):
    """[agent]: deadlines of the node agent, and its memory alarm."""

    ready_deadline: Deadline = Seconds(300.0)
    """Longest time until every node has joined the Ray cluster; then the job fails and names who is missing."""
    placement_deadline: Deadline = Seconds(600.0)
    """Longest time until the driver's actors are placed and loaded."""
    stop_grace: Duration = Seconds(20.0)
    """Time that a child process has between SIGTERM and SIGKILL at teardown."""
    save_grace: Duration | None = None
    """Longest time from asking the driver to save and stop until it is ended without. Left out: twice the longest step and save so far, at least 1 min; 5 min while neither was measured."""
    save_before_limit: Duration | None = None
    """Least time before the end of `job.time_limit` at which the driver is asked to save and stop; the longest step and save so far and the teardown are taken where they are longer. Left out: 2 min, or a tenth of `job.time_limit` where that is less."""
    hang_after: Deadline = Seconds(3600.0)
    """Least time without any event of the driver after which it counts as hung; three times the longest that its phase has taken so far where that is longer. Then the stacks of all its processes are collected and the attempt fails. A driver that tells no phase is not judged."""
    dashboard: bool = False
    """Start Ray's dashboard on the head node, on loopback and behind the job's token, for `miles-hpc attach`; needs ray[default] there."""
    memory_alarm: PositiveSize | None = None
    """Host memory of a node above which the agent writes a `memory_alarm` event; left out, the plan's figure."""
    on_memory_alarm: Literal["warn", "drop_page_cache", "stop"] = "warn"
    """What it does besides: nothing, drop the page cache of the checkpoint files (`offload.drop_page_cache`), or ask the driver to save and end the job, which continues from that checkpoint when it is started again."""
