"""Methods in which clients hold some entries of a network each, and share those that several hold."""
