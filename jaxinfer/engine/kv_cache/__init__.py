"""The pages of requests: allocation, sharing, tiers; without jax."""
