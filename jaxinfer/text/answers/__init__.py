"""Answers of chat models: reasoning, content and tool calls, read from the text and constrained by a structure."""
