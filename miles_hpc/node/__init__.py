"""The compute node's agent, on the standard library alone, so that it can diagnose a broken environment."""
