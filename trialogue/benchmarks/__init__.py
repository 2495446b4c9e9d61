"""Published benchmarks, one package each: their environments, conversation rules and graders."""
