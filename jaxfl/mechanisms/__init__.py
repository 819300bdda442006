"""Mechanisms: building blocks of several methods. A mechanism calls no method."""
