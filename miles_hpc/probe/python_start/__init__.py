"""A folder for PYTHONPATH of the job's processes: what every Python there does first; holds `sitecustomize` alone."""
