"""The benchmark: workloads, how they are measured, the PyTorch loop beside them, and the report."""
