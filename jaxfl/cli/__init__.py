"""The command `jaxfl`."""

from jaxfl.cli.commands import COMMANDS
from jaxfl.cli.console import entry, main

__all__ = ["COMMANDS", "entry", "main"]
