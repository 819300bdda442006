"""Methods in which clients of any architecture tell each other the mean features of every class."""
