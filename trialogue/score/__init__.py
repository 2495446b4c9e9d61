"""How well it went: rewards, metrics, evaluation and benchmarks."""
