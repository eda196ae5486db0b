"""Drafters: on the host by n-grams and suffixes; on the device by a small model, heads or the first layers."""
