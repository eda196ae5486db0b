"""A server that speaks OpenAI's API (extra `serve`)."""

# Defaults, here so that the command's help shows them without the extra.
MAX_BODY_BYTES = 2**22
DRAIN_SECONDS = 30.0
MAX_FILE_BYTES = 2**27
