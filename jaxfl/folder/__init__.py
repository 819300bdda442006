"""A run's folder: which files there are, who owns it, and what they say of the run and of its code."""
