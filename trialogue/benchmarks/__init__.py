"""Benchmarks of other people, one room each: their worlds, their loop rules and their graders."""
