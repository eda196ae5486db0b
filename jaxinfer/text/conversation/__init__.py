"""Conversations in the form that a chat template reads."""
