"""Methods in which clients train architectures other than their own."""
