"""From stored tensors to those of `Params`: which ones, if they fit, and how they are read, rearranged and placed."""
