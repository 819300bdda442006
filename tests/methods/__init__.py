"""What every registered method promises, and what each of them computes."""
