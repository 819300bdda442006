"""Methods in which clients of one architecture share a model or a part of it."""
