"""miles-hpc: one TOML job spec through a Slurm cluster to a post-trained model.

This package root imports nothing, so that the login node's commands start fast and the compute node's agent runs on a
bare CPython. It knows its version and nothing else.
"""

__version__ = "0.1.0"
