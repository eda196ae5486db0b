"""Families most of whose layers keep a state instead of keys and values."""
