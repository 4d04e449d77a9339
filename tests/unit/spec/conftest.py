"""Spec files that the tests of the spec share."""

from pathlib import Path

import pytest

from tests.unit.spec.written import MILES, NATIVE, write


@pytest.fixture
def native(tmp_path: Path) -> Path:
    """A smallest spec of the native engine."""
    return write(tmp_path, "native.toml", NATIVE)


@pytest.fixture
def miles(tmp_path: Path) -> Path:
    """A smallest spec of the miles engine."""
    return write(tmp_path, "miles.toml", MILES)
