"""The `jaxinfer` command."""
