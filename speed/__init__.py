"""Speed, measured side by side with what people would use instead: `python -m speed`."""
