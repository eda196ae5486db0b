"""Adapters, where vLLM has them."""
