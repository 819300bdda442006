"""Methods that take networks apart and put them together anew."""
