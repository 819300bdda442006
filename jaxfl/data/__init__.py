"""Sources, partitions, and the federation on the device."""
