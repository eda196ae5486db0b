"""The mixers that keep a state of a request, and what they share."""
