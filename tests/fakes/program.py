"""Stands in for every Slurm command: notes the call and answers from files.

Reader: the shims in bin/. FAKE_SLURM_DIR holds `calls.jsonl` and, for each verb, answers `VERB.1`, `VERB.2`, ... (the last
one goes on for ever): {"stdout", "stderr", "exit_code"}. Without an answer a command behaves like one without accounting:
sbatch accepts, sacct is disabled, the others know no job.
"""

import json
import os
import sys
from pathlib import Path

ACCEPTED = {"stdout": "Submitted batch job 4100\n", "stderr": "", "exit_code": 0}
UNKNOWN_JOB = {
    "stdout": "",
    "stderr": "slurm_load_jobs error: Invalid job id specified\n",
    "exit_code": 1,
}
NO_ACCOUNTING = {"stdout": "", "stderr": "Slurm accounting storage is disabled\n", "exit_code": 1}
NOTHING = {"stdout": "", "stderr": "", "exit_code": 0}
DEFAULTS = {
    "sbatch": ACCEPTED,
    "sacct": NO_ACCOUNTING,
    "squeue": UNKNOWN_JOB,
    "scontrol": UNKNOWN_JOB,
    "scancel": NOTHING,
    "srun": NOTHING,
}


def main() -> int:
    folder, verb, arguments = Path(os.environ["FAKE_SLURM_DIR"]), sys.argv[1], sys.argv[2:]
    script = ""
    if verb == "sbatch" and arguments and Path(arguments[-1]).is_file():
        script = Path(arguments[-1]).read_text()
    slurm_names = sorted(name for name in os.environ if name.startswith(("SLURM", "SBATCH")))
    with (folder / "calls.jsonl").open("a") as calls:
        call = {"verb": verb, "argv": arguments, "script": script, "slurm_names": slurm_names}
        calls.write(json.dumps(call) + "\n")
    made = [json.loads(line)["verb"] for line in (folder / "calls.jsonl").read_text().splitlines()]
    wanted = made.count(verb)
    numbers = [n for n in range(wanted, 0, -1) if (folder / f"{verb}.{n}").exists()]
    answer = (
        json.loads((folder / f"{verb}.{numbers[0]}").read_text()) if numbers else DEFAULTS[verb]
    )
    sys.stdout.write(answer["stdout"])
    sys.stderr.write(answer["stderr"])
    return answer["exit_code"]


sys.exit(main())
