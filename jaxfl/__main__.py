"""``python -m jaxfl`` is the command `jaxfl`."""

from jaxfl.cli import entry

entry()
