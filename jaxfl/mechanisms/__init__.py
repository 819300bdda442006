"""What several methods are made of. A mechanism calls no method."""
