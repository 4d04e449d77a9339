"""A node agent without Ray: takes its attempt like the real one, does as `stub.json` says, and writes the verdict.

Copied over `miles_hpc/node/__main__.py` in a run folder's frozen code, so that submission, signals, exit codes and state
are those of a real job in a second. stub.json: {"exit_code", "hold", "steps"}.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from miles_hpc.errors import MilesHpcError
from miles_hpc.handoff import read_handoff
from miles_hpc.paths import RunDir
from miles_hpc.run.events import EventLog, Kind
from miles_hpc.run.resume import Identity, Verdict, new_attempt, wait_for_attempt, write_verdict
from miles_hpc.slurm import identify_node, is_job_live


def main() -> int:
    run = RunDir(Path(sys.argv[1]))
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: told.append(number))
    handoff = read_handoff(run.handoff)
    me = identify_node(handoff.cluster, os.environ)
    behaviour = json.loads((run.root / "stub.json").read_text())
    if not me.is_head:
        attempt = wait_for_attempt(run, me.job_id, me.restart_count, deadline_s=30)
        end_s = time.monotonic() + 120
        while not attempt.verdict.exists() and time.monotonic() < end_s:
            time.sleep(0.05)
        return 0
    identity = Identity(
        job_id=me.job_id,
        restart_count=me.restart_count,
        cluster=handoff.cluster,
        head_node=me.node,
        started_s=time.time(),
    )
    attempt = new_attempt(
        run,
        identity,
        resume=handoff.resume,
        max_attempts=handoff.max_attempts,
        is_live=lambda other: is_job_live(other.job_id, other.cluster),
    )
    environ = {name: os.environ.get(name) for name in ("PYTHONPATH", "CANARY", "SLURM_MEM_PER_CPU")}
    seen = {"cwd": str(Path.cwd()), "argv": sys.argv, "code": __file__, "environ": environ}
    (attempt.root / "seen.json").write_text(json.dumps(seen))
    events = EventLog(attempt.node_events(me.node), me.node)
    events.append(Kind.CLUSTER_READY, num_nodes=len(me.nodes))
    for step in range(1, behaviour.get("steps", 0) + 1):
        events.append(Kind.PHASE, phase="train", step=step)
        fields = {"reward": 0.5, "tokens_per_s": 120.0, "time_left_s": 75.0}
        events.append(Kind.STEP, step=step, num_steps=behaviour["steps"], **fields)
        attempt.driver_log.open("a").write(f"step {step}\n")
        time.sleep(0.3)
    end_s = time.monotonic() + 120
    while behaviour.get("hold") and not told and time.monotonic() < end_s:
        time.sleep(0.05)
    code = behaviour.get("exit_code", 0)
    state, code = ("CANCELLED", 1) if told else (("FAILED", code) if code else ("COMPLETED", 0))
    reason = f"told to stop by signal {told[0]}" if told else f"the stub ended with {code}"
    write_verdict(
        attempt,
        Verdict(
            state=state, exit_code=code, driver_exit_code=code, reason=reason, ended_s=time.time()
        ),
    )
    return code


try:
    sys.exit(main())
except MilesHpcError as error:
    sys.stderr.write(f"{error}\n")
    sys.exit(error.exit_code)
