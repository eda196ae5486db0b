"""Tokenizers of other files than tokenizer.json, made into those of the library `tokenizers`."""
