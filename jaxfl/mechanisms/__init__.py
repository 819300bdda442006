"""What several methods are made of. A mechanism knows no method."""
