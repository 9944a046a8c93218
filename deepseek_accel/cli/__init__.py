"""The command `deepseek-accel`.

Exit codes: 0 done, 1 a comparison failed, 2 wrong input, 3 a wrong result was not timed.
Results go to stdout, progress and messages to stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..errors import AccelError
from . import bench, models, stress, tokenizing
from .models import checkpoint_plan, place

__all__ = ["checkpoint_plan", "main", "parser", "place"]


def parser() -> argparse.ArgumentParser:
    from .. import __version__

    top = argparse.ArgumentParser(
        prog="deepseek-accel",
        description="Make Hugging Face DeepSeek models fast in place.",
        epilog="exit codes: 0 done, 1 a comparison failed, 2 wrong input, 3 a wrong result was not timed",
    )
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    models.add_commands(commands)
    benches = commands.add_parser("bench", help="time whole models or single ops").add_subparsers(
        title="benches", required=True, metavar="BENCH"
    )
    bench.add_commands(benches)
    stress.add_commands(benches)
    tokenizing.add_commands(benches)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(words)
    arguments.command_line = ["deepseek-accel", *words]
    try:
        return int(arguments.run(arguments))
    except AccelError as error:
        print(f"deepseek-accel: {error}", file=sys.stderr)
        return 2
