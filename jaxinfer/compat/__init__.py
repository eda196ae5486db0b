"""The interfaces of other engines, for scripts that were written for them."""
