"""The command line: `overlap COMMAND`, or `python -m overlap COMMAND`.

A command is a module with `add_arguments(parser)` and `run(options, argv)`, which returns an exit code; `argv` is the
command line from the command's name on, to start ranks with. It is imported when it is called, so its imports cost
the others nothing; it raises `ConfigurationError` for options that do not go together.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from overlap import __version__
from overlap.errors import ConfigurationError

# name -> (module, description): a new command is one line here.
COMMANDS = {
    "demo": ("overlap.demo", "trains ResNet-18 on digits, plainly and overlapped, and compares the two"),
    "estimate": ("overlap.estimate", "estimates how long a step takes with each chain, on a link of your speed"),
    "doctor": ("overlap.doctor", "says whether this installation works, for you and for a bug report"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 for options that it cannot work with."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="overlap",
        description="Work that runs in DDP's backward pass.",
        epilog="commands:\n" + "\n".join(f"  {name:8}{description}" for name, (_, description) in COMMANDS.items()),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"overlap {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="see below")
    # The command's own options are not known yet: everything after its name is left to the second parser.
    options = parser.parse_args(argv[:1] or ["--help"])
    module, description = COMMANDS[options.command]
    if sys.stderr.isatty() and "RANK" not in os.environ:
        print("Importing PyTorch ...", file=sys.stderr, flush=True)
    command: Any = importlib.import_module(module)
    parser = argparse.ArgumentParser(
        prog=f"overlap {options.command}",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_arguments(parser)
    try:
        return int(command.run(parser.parse_args(argv[1:]), argv))
    except ConfigurationError as error:
        parser.error(str(error))
