"""The styles in which families of models write reasoning and tool calls, a file per style."""
