"""Files and batches of OpenAI's API, on a server that keeps files."""
