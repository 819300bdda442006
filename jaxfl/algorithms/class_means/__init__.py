"""Methods in which clients of any architecture share the mean features of every class."""
