"""`python -m miles_hpc.node RUN_DIR`: the command that each Slurm task runs, one a node."""

import os
import sys

from miles_hpc.node.entry import main
from miles_hpc.node.guard import guard

if __name__ == "__main__":
    sys.exit(guard(lambda leave_word: main(sys.argv[1:], os.environ, leave_word)))
