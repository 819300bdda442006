"""Methods in which clients tell each other what they see on images that all have."""
