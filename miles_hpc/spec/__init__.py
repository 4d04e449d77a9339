"""What the user asked: the validated job spec. Knows nothing of plans, engines' flags or Slurm's argv."""
