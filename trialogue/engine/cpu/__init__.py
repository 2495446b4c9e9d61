"""The compiled fast path of the embedded engine on a CPU."""
