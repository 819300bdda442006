"""What users choose: options with their ranges, and choices written as text."""
