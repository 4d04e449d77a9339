"""The secrets of a job at submission: taken in, kept for the head node, and forgotten when the job is refused or cancelled.

The run folder learns names and a path alone. Knows no scheduler command of its own.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from miles_hpc.errors import SubmitError
from miles_hpc.handoff import SecretSource
from miles_hpc.paths import RunDir
from miles_hpc.run.resume import read_object
from miles_hpc.secret_store import read_secrets, state_folder, store_secrets
from miles_hpc.slurm import is_job_live
from miles_hpc.spec.job import JobSpec

# A run folder appears after its secrets; nobody takes this long to write one.
_NEW_S = 3600.0


@contextmanager
def taken_secrets(spec: JobSpec, root: Path) -> Iterator[SecretSource | None]:
    """Yield where the driver of the run in `root` will find its secrets; an error inside leaves none behind.

    Raises:
        SubmitError: if a name has no value, or the file is not the user's alone.
    """
    if spec.secrets is None:
        yield None
        return
    if spec.secrets.file is not None:
        path = os.path.abspath(spec.secrets.file.expanduser())  # noqa: PTH100  # not resolve(): nodes know this name
        source = SecretSource(names=spec.secrets.names, path=path, is_stored=False)
        _, faults = read_secrets(source, "secrets.file")
        if faults:
            raise SubmitError("\n".join(str(fault) for fault in faults))
        yield source
        return
    source = _store_environment(spec.secrets.names, root)
    try:
        yield source
    except BaseException:
        Path(source.path).unlink(missing_ok=True)
        raise


def _store_environment(names: tuple[str, ...], root: Path) -> SecretSource:
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise SubmitError(
            f"secrets.names: found no {', '.join(missing)} in this environment; expected a value for every name. "
            "Export it, or set secrets.file to a file of NAME=value lines with mode 0600."
        )
    folder = state_folder(os.environ)
    try:
        _forget_ended(folder)
        path = store_secrets({name: os.environ[name] for name in names}, folder, root)
    except OSError as error:
        raise SubmitError(
            f"secrets: {error}; expected to write {folder}, a folder of this user that the head node sees. "
            "Set XDG_STATE_HOME to another place, or use secrets.file."
        ) from error
    return SecretSource(names=names, path=str(path), is_stored=True)


def forget_secrets(run: RunDir) -> None:
    """Remove what was stored for `run`; a file that the user keeps stays."""
    source = (read_object(run.handoff) or {}).get("secrets")
    if isinstance(source, dict) and source.get("is_stored") is True:
        with suppress(OSError):
            Path(str(source["path"])).unlink(missing_ok=True)


def _forget_ended(folder: Path) -> None:
    """Remove stored secrets whose run is gone or whose job can no longer read them."""
    if not folder.is_dir() or folder.stat().st_uid != os.getuid():
        return
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError, KeyError):
            root = Path(json.loads(path.read_text(encoding="utf-8"))["run_dir"])
            job = read_object(root / "job.json")
            if job is None:
                dead = not root.exists() and time.time() - path.stat().st_mtime > _NEW_S
            else:
                is_local = job["cluster"] == "local"
                dead = not is_job_live(str(job["job_id"]), "local" if is_local else "slurm")
            if dead:
                path.unlink(missing_ok=True)
