"""Memory maps: Linux grants a process some 65,000, and every compiled program takes hundreds of them."""

from pathlib import Path

TAKEN = Path("/proc/self/maps")  # a line for each
GRANTED = Path("/proc/sys/vm/max_map_count")
CROWDED = 0.5  # share of those granted; one more run may take thousands


def crowded() -> bool:
    """Return whether this process has used up half of its memory maps. Beyond the last one XLA crashes.

    Systems other than Linux do not tell, so it is False there.
    """
    try:
        taken, granted = TAKEN.read_bytes().count(b"\n"), int(GRANTED.read_text())
    except (OSError, ValueError):
        return False
    return taken > CROWDED * granted
