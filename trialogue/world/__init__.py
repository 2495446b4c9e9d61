"""What there is: tools, databases, domains and their tasks."""
