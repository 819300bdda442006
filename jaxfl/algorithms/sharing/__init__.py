"""Methods in which clients share a model of one architecture, or a part of it."""
