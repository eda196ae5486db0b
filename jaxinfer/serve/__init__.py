"""A server that speaks OpenAI's API (extra `serve`)."""
