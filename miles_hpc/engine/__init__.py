"""What an engine needs: driver command, variables, and the findings that only this engine has. Knows no node and no Slurm."""
