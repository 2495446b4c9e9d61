"""The training of the tiny base model."""
