"""`python -m miles_hpc`: the command line where the `miles-hpc` script is not installed."""

from miles_hpc.cli import main

main()
