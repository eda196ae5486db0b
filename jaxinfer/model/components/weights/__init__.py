"""Weights of products: arrays, and what stands for them."""
