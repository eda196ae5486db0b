"""The model as pure functions of arrays: parameters, layers, the cache and the batch."""
