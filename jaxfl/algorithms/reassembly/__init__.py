"""Methods that take networks apart and reassemble their blocks."""
