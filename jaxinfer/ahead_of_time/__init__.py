"""Compiles all steps of an engine's start before it, without weights: for the devices here, or for described ones."""
