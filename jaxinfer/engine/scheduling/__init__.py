"""Chooses the work of the next step and applies its result to requests; without jax."""
