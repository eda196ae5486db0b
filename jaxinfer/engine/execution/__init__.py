"""Steps on the device: shapes, compilation, launch."""
