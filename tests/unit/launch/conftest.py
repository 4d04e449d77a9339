"""Fixtures of the login node's tests: the fake Slurm, specs and plans of the real recipes, run folders."""

from tests.fakes.recipes import demo, make_run  # noqa: F401
from tests.fakes.slurm import fake_slurm, no_slurm  # noqa: F401
