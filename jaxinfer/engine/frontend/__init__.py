"""Turns a caller's prompts into requests, and their tokens into the caller's results."""
