"""One run: its data are prepared, its rounds follow each other, and it goes on after any end."""
