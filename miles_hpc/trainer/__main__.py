"""The native engine's driver: `python -m miles_hpc.trainer RUN_DIR`, started by the head node's agent.

Reads plan.json and the agent's environment, starts the actors, runs the loop. Exit code 0 when all steps are done, 75 when
it saved and stopped on request, 12 with one line on stderr when something failed, 143 after SIGTERM.
"""

import logging
import signal
import sys
from pathlib import Path
from types import FrameType

import ray

from miles_hpc.errors import MilesHpcError
from miles_hpc.paths import RunDir
from miles_hpc.run.save_request import DRIVER_EXIT_CODE
from miles_hpc.trainer.inputs import read_environ, read_plan

_log = logging.getLogger("miles_hpc.trainer")


def main(argv: list[str]) -> int:
    """Run the driver for the run folder `argv[0]` and return its exit code."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    if len(argv) != 1:
        sys.stderr.write(f"error: driver: found arguments {argv}; expected one RUN_DIR.\n")
        return 2
    try:
        is_done = _drive(RunDir(Path(argv[0]).resolve()))
    except MilesHpcError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    finally:
        ray.shutdown()
    return 0 if is_done else DRIVER_EXIT_CODE


def _drive(run: RunDir) -> bool:
    """Return whether the run's last step is done; it is not after a request to save and stop."""
    import os

    from miles_hpc.trainer.data import TaskData, make_tasks
    from miles_hpc.trainer.loop import Trainer, adapter_config
    from miles_hpc.trainer.startup import connect, start_actors
    from miles_hpc.trainer.stop_request import read_stop_requests

    planned = read_plan(run)
    environ = read_environ(os.environ)
    stop = read_stop_requests(environ.attempt_dir)
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    # What the spec alone can get wrong is found before anything is placed.
    adapter_config(planned.spec)
    tasks = make_tasks(planned.spec)
    connect(environ.ray_address)
    # After ray.init, which installs its own handler.
    signal.signal(signal.SIGTERM, _terminate)
    actors = start_actors(run, planned, environ)
    data = TaskData(planned.spec, tasks, actors.model_dir)
    trainer = Trainer(
        run=run, spec=planned.spec, actors=actors, data=data, events=environ.events, stop=stop
    )
    return trainer.train()


def _terminate(number: int, _: FrameType | None) -> None:
    _log.warning("signal %d: ending; the last complete checkpoint stands", number)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
