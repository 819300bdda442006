"""What a run computes on: processes that work together, and the clocks of clients' devices."""
