"""Methods that give every client its own mixture of the clients' models."""
