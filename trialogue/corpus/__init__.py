"""What is imitated: scenarios are drafted, conversations synthesized, verified and reviewed."""
