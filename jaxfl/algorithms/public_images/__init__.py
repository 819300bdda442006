"""Methods with public images: clients exchange predictions or features on them, or the server distils."""
