"""Data to imitate: draft scenarios, synthesize conversations, verify and review them."""
