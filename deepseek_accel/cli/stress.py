"""`deepseek-accel bench stress`, the engine under load, and `bench report`, a page of any results."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import AccelError
from .shared import end, numbers, place_arguments, record, write


def add_commands(benches: Any) -> None:
    """Add them to the subparsers of `bench`."""
    _stress_arguments(benches.add_parser("stress", help="the engine under load, from one user to many"))
    command = benches.add_parser("report", help="one HTML page from the JSON files of benches")
    command.add_argument("files", metavar="FILE.json", nargs="+", help="written by any bench with --json")
    command.add_argument("--html", metavar="OUT.html", required=True, help="the page to write")
    command.add_argument("--title", default="Benchmarks of deepseek_accel", help="its heading (default: %(default)s)")
    command.set_defaults(run=bench_report)


def _stress_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", help="as in bench generate (default: v2-lite on a GPU, tiny on a CPU)")
    command.add_argument("--load", choices=("closed", "open", "none"), default="closed", help="(default: closed loop)")
    command.add_argument(
        "--concurrency", metavar="N,...", help="users of the closed loop (default: 1,2,4,...,128; 1,2,4,8 on a CPU)"
    )
    command.add_argument("--rate", metavar="R,...", help="requests per second of the open loop")
    command.add_argument("--window", metavar="MS,...", help="gather requests of the open loop for so long (default: 0)")
    command.add_argument("--requests", type=int, metavar="N", help="per point (default: 4 per user, at least 16; 256)")
    command.add_argument("--mix", choices=("fixed", "chat"), default="fixed", help="lengths (default: fixed)")
    command.add_argument("--prompt-tokens", type=int, metavar="N", help="of each (default 1024), or the mean of a chat")
    command.add_argument("--new-tokens", type=int, metavar="N", help="of each (default 128), or the mean of a chat")
    command.add_argument("--stock", action="store_true", help="also stock generate on a static batch, for the ratio")
    command.add_argument(
        "--split", metavar="N,...", nargs="?", const="1024,2048", help="also prefill and decode apart (1024,2048)"
    )
    command.add_argument("--breakdown", type=int, metavar="N", help="also where the time of a prompt of N tokens goes")
    command.add_argument("--max-batch", type=int, metavar="N", help="rows of the engine that decode at once")
    command.add_argument("--max-pages", type=int, metavar="N", help="pages of the engine (default: as memory allows)")
    command.add_argument("--prefill-tokens", type=int, default=1024, metavar="N", help="per step (default 1024)")
    command.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals (default 0)")
    place_arguments(command, "bfloat16 on a GPU, float32 on a CPU by default")
    command.add_argument("--json", metavar="FILE", help="write the rows and the environment, after every point")
    command.set_defaults(run=bench_stress)


def bench_stress(arguments: argparse.Namespace) -> int:
    from ..bench import stress, stress_tables, tables
    from ..bench.environment import resolve_device
    from ..bench.loads import Mix

    gpu = resolve_device(arguments.device).type == "cuda"
    users = arguments.concurrency or ("1,2,4,8,16,32,64,128" if gpu else "1,2,4,8")
    options = stress.Options(
        model=arguments.model or ("v2-lite" if gpu else "tiny"),
        mix=Mix.named(arguments.mix, arguments.prompt_tokens, arguments.new_tokens),
        load=arguments.load,
        users=tuple(numbers(users, int)),
        rates=tuple(numbers(arguments.rate, float)) if arguments.rate else (),
        windows=tuple(numbers(arguments.window, float)) if arguments.window else (0.0,),
        requests=arguments.requests,
        stock=arguments.stock,
        split=tuple(numbers(arguments.split, int)) if arguments.split else (),
        breakdown=arguments.breakdown,
        max_batch=arguments.max_batch,
        max_pages=arguments.max_pages,
        prefill_tokens=arguments.prefill_tokens,
        device=arguments.device,
        dtype=arguments.dtype,
        seed=arguments.seed,
    )
    steps = 1 + len(stress.points(options)) * (1 + options.stock) + len(options.split) * (1 + options.stock)
    with tables.progress(steps + (options.breakdown is not None)) as step:
        result = stress.run(options, step, keep=record(arguments, stress_tables.stress_table))
    result["command"] = arguments.command_line
    write(arguments, result)
    console = tables.console()
    if result["rows"]:
        console.print(stress_tables.stress_table(result))
    else:
        console.print(stress_tables.heading(result))
    for line in stress_tables.stress_lines(result):
        console.print(line)
    return end(result["rows"], stress.exit_code(result["rows"]))


def bench_report(arguments: argparse.Namespace) -> int:
    from ..bench import report_page

    page = report_page.page([(name, report_page.read(name)) for name in arguments.files], arguments.title)
    try:
        Path(arguments.html).write_text(page, encoding="utf-8")
    except OSError as error:
        raise AccelError(f"cannot write {arguments.html!r}: {error}") from error
    print(f"{arguments.html}: {len(arguments.files)} result(s), {len(page.encode()):,} bytes")
    return 0
