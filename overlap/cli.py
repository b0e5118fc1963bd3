"""The command line: `overlap COMMAND`, or `python -m overlap COMMAND`.

A command is a module with `add_arguments(parser)` and `run(options, argv)`. It is imported when it is called, so
what it needs costs the others nothing; it raises `ConfigurationError` for options that do not go together.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol, cast

from overlap.errors import ConfigurationError

__all__ = ["main"]

# name -> (module, what it does): a new command is one line here.
COMMANDS = {
    "demo": ("overlap.demo.command", "trains ResNet-18 on digits, plainly and overlapped, and compares the two"),
    "bench": ("overlap.bench.command", "times variants against PyTorch's own, on links of a known speed"),
    "trace": ("overlap.trace.command", "records a plain and an overlapped step, as a picture and a Perfetto trace"),
}

_BAD_OPTIONS = 2


class Command(Protocol):
    """What the module of a command offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's options."""

    def run(self, options: argparse.Namespace, argv: Sequence[str]) -> int:
        """Runs the command; `argv` is the command line from the command's name on, to start ranks with."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 for options that it cannot work with."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="overlap", description="Work that runs in DDP's backward pass.", allow_abbrev=False)
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=_describe_commands())
    # The command's own options are not known yet: everything after its name is left to the second parser.
    options = parser.parse_args(argv[:1] or ["--help"])
    module, description = COMMANDS[options.command]
    command = cast(Command, importlib.import_module(module))
    parser = _Parser(
        prog=f"overlap {options.command}",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_arguments(parser)
    try:
        return command.run(parser.parse_args(argv[1:]), argv)
    except ConfigurationError as error:
        parser.error(str(error))


class _Parser(argparse.ArgumentParser):
    """Answers a bad option with one line that says what is allowed."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            names = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            message = f"{message} (allowed: {', '.join(names)})"
        self.exit(_BAD_OPTIONS, f"{self.prog}: {message}\n")


def _describe_commands() -> str:
    return "; ".join(f"{name}: {description}" for name, (_, description) in COMMANDS.items())
