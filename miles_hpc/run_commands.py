"""The commands over runs that exist: each is a few lines that call below, like those of `cli`, which registers them.

Imports inside the commands, so that `--help` stays quick on a login node.
"""

import json
import sys

from miles_hpc.launch.options import AsJson, Overrides, RunPath


def resume(run: RunPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Submit a further job for a run that has ended; it continues from the last complete checkpoint."""
    from miles_hpc.launch.queue import open_run
    from miles_hpc.launch.resume import resume_run

    folder = open_run(run)
    done = resume_run(folder, tuple(overrides or ()))
    if as_json:
        fields = {"job_id": done.job_id, "cluster": done.cluster, "checkpoint": done.checkpoint}
        print(json.dumps({"run_dir": str(folder.root), **fields}))
        return
    print(folder.root)
    sys.stdout.flush()
    start = "from the beginning: there is no complete checkpoint"
    if done.checkpoint is not None:
        start = f"from {done.checkpoint}"
    print(f"job {done.job_id} on {done.cluster} continues {start}", file=sys.stderr)
