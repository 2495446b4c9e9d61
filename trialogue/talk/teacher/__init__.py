"""The teacher: an agent for every domain, made from what its tasks already say. See `teacher.py`."""
