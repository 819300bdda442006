"""Methods that average the entries that several networks have in common."""
