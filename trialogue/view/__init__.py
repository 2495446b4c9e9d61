"""What one sees: reports, the terminal and the local page."""
