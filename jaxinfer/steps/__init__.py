"""The jitted functions: prefill, decode and verify steps, decode loops, draft heads."""
