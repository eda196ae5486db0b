"""What layers are made of: a file for each component has its description, its tensors and its function."""
