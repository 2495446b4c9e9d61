"""Messages to token ids and back: one file for each format."""
