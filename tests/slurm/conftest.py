"""The shared Slurm of this folder: one cluster for all its tests, skipped or failed by what is installed."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.rig import SlurmRig, missing_programs

NUM_NODES = 4


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmRig]:
    """Return a running cluster of four nodes."""
    missing = missing_programs()
    if missing:
        message = (
            f"no {', '.join(missing)} on this machine; install Debian's slurm-wlm and munge "
            "(apt-get install --no-install-recommends slurm-wlm munge)"
        )
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    # Short, because munged and slurmd put sockets there; not pytest's tmp_path.
    root = Path(tempfile.mkdtemp(prefix="slurm-rig-"))
    root.chmod(0o755)
    rig = SlurmRig(root, NUM_NODES)
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()
        shutil.rmtree(root, ignore_errors=True)
