"""The families that are Llama but for one part of each layer."""
