"""`deepseek-accel bench tokenizing`: what the tokenizer ring gains."""

from __future__ import annotations

import argparse
from typing import Any

from .shared import DEVICE_HELP, end, numbers, record, write


def add_commands(benches: Any) -> None:
    """Add it to the subparsers of `bench`."""
    command = benches.add_parser("tokenizing", help="tokenising beside the steps, and in line with them")
    command.add_argument("--step-ms", default="2,5,10,20", metavar="MS,...", help="(default: %(default)s)")
    command.add_argument("--batch", type=int, default=8, metavar="N", help="texts a batch (default 8)")
    command.add_argument("--prompt-tokens", type=int, default=1024, metavar="N", help="of each text (default 1024)")
    command.add_argument("--batches", type=int, default=40, metavar="N", help="in all (default 40)")
    command.add_argument("--ring", type=int, default=8, metavar="N", help="batches in flight (default 8)")
    command.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs of each (default 3)")
    command.add_argument("--device", default="auto", help=DEVICE_HELP)
    command.add_argument("--json", metavar="FILE", help="write the rows and the environment")
    command.set_defaults(run=bench_tokenizing)


def bench_tokenizing(arguments: argparse.Namespace) -> int:
    from ..bench import tables, tokenizing

    options = tokenizing.Options(
        step_ms=tuple(numbers(arguments.step_ms, float)),
        batch=arguments.batch,
        prompt_tokens=arguments.prompt_tokens,
        batches=arguments.batches,
        num_batches=arguments.ring,
        repeats=arguments.repeats,
        device=arguments.device,
    )
    with tables.progress(2 + len(options.step_ms)) as step:
        result = tokenizing.run(options, step, record(arguments, tokenizing.tokenizing_table))
    result["command"] = arguments.command_line
    write(arguments, result)
    tables.console().print(tokenizing.tokenizing_table(result))
    return end(result["rows"], tokenizing.exit_code(result["rows"]))
