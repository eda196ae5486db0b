"""Turns a caller's prompts into requests, and their tokens into deltas and completions."""
