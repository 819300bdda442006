"""Users' choices: options with their ranges, and choices written as text."""
