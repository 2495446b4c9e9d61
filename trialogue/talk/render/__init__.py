"""Convert messages to token ids and back, one module per format."""
