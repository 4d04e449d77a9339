"""What will happen: pure functions from a spec to a plan. Knows no file, no clock and no engine flag."""
