"""What the driver is given: plan.json and the environment that the node agent made.

Knows neither Ray nor models. The table of variables stands in docs/design.md.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from miles_hpc.errors import DriverError
from miles_hpc.paths import RunDir
from miles_hpc.plan.plan import VERSION, Layout, RolloutLayout
from miles_hpc.run.events import EventLog
from miles_hpc.spec.job import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """The parts of plan.json that the driver follows."""

    spec: JobSpec
    layout: Layout
    rollout: RolloutLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverEnviron:
    """The agent's variables.

    Attributes:
        nccl: library to preload into actors that use NCCL; None when the job must not preload one.
        site_preload: what the site preloads into every process, in LD_PRELOAD's form.
    """

    ray_address: str
    attempt_dir: Path
    node: str
    events: EventLog
    nccl: Path | None
    site_preload: str = ""


def read_plan(run: RunDir) -> PlannedJob:
    """Read plan.json of a run folder.

    Raises:
        DriverError: if it is missing, malformed, of another version, or not for the native engine.
    """
    try:
        raw = json.loads(run.plan.read_text(encoding="utf-8"))
        if raw["version"] != VERSION:
            raise ValueError(f"version {raw['version']}, expected {VERSION}")
        planned = PlannedJob(
            spec=JobSpec.model_validate_json(json.dumps(raw["spec"])),
            layout=Layout(**raw["layout"]),
            rollout=RolloutLayout(**raw["rollout"]),
        )
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise DriverError(
            f"{run.plan}: found {error}; expected the plan that submit or render writes. "
            "Submit the spec again into a new run folder."
        ) from error
    if planned.spec.job.engine != "native":
        raise DriverError(
            f'{run.plan}: found job.engine = "{planned.spec.job.engine}"; expected "native". '
            "This driver runs the native engine only."
        )
    return planned


def read_environ(environ: Mapping[str, str]) -> DriverEnviron:
    """Return the agent's variables from `environ`.

    Raises:
        DriverError: naming every variable that is missing.
    """
    names = ("RAY_ADDRESS", "MILES_HPC_ATTEMPT_DIR", "MILES_HPC_NODE", "MILES_HPC_EVENTS")
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise DriverError(
            f"driver: found no {', '.join(missing)} in the environment; expected the node agent to set them. "
            "Start the driver through `python -m miles_hpc.node RUN_DIR`, not by hand."
        )
    node = environ["MILES_HPC_NODE"]
    nccl = environ.get("MILES_HPC_NCCL")
    return DriverEnviron(
        ray_address=environ["RAY_ADDRESS"],
        attempt_dir=Path(environ["MILES_HPC_ATTEMPT_DIR"]),
        node=node,
        events=EventLog(Path(environ["MILES_HPC_EVENTS"]), node),
        nccl=Path(nccl) if nccl else None,
        site_preload=environ.get("LD_PRELOAD", ""),
    )
