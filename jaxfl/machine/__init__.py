"""The machine of a run: processes that work together, and the clocks of clients' devices."""
