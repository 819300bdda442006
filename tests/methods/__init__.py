"""Tests of what every registered method guarantees, and of what each method computes."""
