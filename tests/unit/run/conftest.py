"""Fixtures: run folders in every state."""

from tests.fakes.recipes import make_run  # noqa: F401
