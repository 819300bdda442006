"""Methods in which clients exchange predictions or features on images that all have."""
