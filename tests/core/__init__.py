"""Tests of the engine and of what methods are made of."""
