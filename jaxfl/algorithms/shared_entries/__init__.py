"""Methods that average what networks of several architectures have in common."""
