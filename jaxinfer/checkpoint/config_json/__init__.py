"""Reading of config.json: what the families share."""
