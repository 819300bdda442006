"""Methods that give every client a mixture of its own of what the others hold."""
