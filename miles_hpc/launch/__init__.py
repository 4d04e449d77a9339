"""The login node: writes the run folder and hands the job to the scheduler. Knows nothing of what runs on a node."""
