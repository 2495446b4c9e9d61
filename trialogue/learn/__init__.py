"""What changes: samples, losses, training."""
