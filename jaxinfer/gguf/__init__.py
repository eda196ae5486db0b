"""Reading of GGUF, the one-file format of llama.cpp, in NumPy: its container, blocks, settings and names; no jax."""
