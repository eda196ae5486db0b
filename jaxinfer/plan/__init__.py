"""What an engine will need, before it runs."""
