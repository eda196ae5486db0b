"""Tokens from and to text, and the grammars that text follows; without jax."""
