"""Fixtures of the flow tests: the fake Slurm."""

from tests.fakes.slurm import fake_slurm, no_slurm  # noqa: F401
