"""The benchmark: workloads, measurements, the PyTorch loop beside them, and the report."""
