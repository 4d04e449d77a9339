"""The driver of jobs of the miles engine: starts Miles' own script on the head node and tells what it does."""
