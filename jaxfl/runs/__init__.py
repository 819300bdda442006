"""Runs as folders: written, resumed, compared, tabulated and drawn."""
