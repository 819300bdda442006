"""What came out: scores of a run, and tables and pictures of many."""
