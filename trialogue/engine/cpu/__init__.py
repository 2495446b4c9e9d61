"""The compiled fast path on a CPU; the engine reaches it through `fast_path.find_fast_path`."""
