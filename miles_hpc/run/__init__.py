"""Between and after attempts: events, attempts, logs and reports of a run folder. Standard library only."""
