"""Methods in which clients also train architectures other than their own."""
