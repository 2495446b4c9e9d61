"""Speed measurements beside alternatives: `python -m speed`."""
