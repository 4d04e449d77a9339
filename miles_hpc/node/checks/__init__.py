"""The one list of checks that a job's preflight and `miles-hpc doctor` share: what is seen, and what it means."""
