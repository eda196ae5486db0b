"""OpenAI's protocol, below the server and batch jobs (extra `serve`): bodies, parameters, messages, errors, answers."""
