"""The deny-list of env/nccl.toml: read as version codes, refused at submission, carried to the nodes."""

import pytest

from miles_hpc.errors import PlanError
from miles_hpc.launch.nccl_pin import read_denied, refuse_denied, version_code


def is_denied(version: str) -> bool:
    return any(entry.covers(version_code(version)) for entry in read_denied())


@pytest.mark.parametrize("version", ["2.28.3", "2.28.5", "2.28.8", "2.30.4"])
def test_a_denied_version_is_refused_with_the_reason(version):
    assert is_denied(version)
    with pytest.raises(PlanError, match=f"nccl.version: found {version}: .*hang"):
        refuse_denied(version, read_denied())


@pytest.mark.parametrize("version", ["2.28.2", "2.28.9", "2.30.3", "2.30.5", "2.30.7", "3.28.5"])
def test_the_versions_around_it_are_not(version):
    assert not is_denied(version)
    refuse_denied(version, read_denied())
