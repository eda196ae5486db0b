"""Several devices: their mesh, and the arrays of an engine on it."""
