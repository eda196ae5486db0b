"""A request on the host: its tokens, its completion, the keys of its pages."""
