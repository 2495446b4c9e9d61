"""Who else drives: thin files that put our conversation into the training loops of others."""
