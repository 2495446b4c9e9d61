"""How the tiny base model is made."""
