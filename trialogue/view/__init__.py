"""Reports, terminal output and the local page."""
