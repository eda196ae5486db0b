"""Attention and matrix kernels for TPU, GPU and CPU behind one signature per operation; imports jax and numpy only."""
