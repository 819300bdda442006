"""Runs, planned and driven: one, those of a comparison, and those of a study's settings."""
