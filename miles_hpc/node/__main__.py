"""`python -m miles_hpc.node RUN_DIR`: the command that each Slurm task runs, one a node."""

import os
import sys

from miles_hpc.node.entry import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
