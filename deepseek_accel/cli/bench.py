"""The commands `deepseek-accel bench ...` that time whole models, caches and single ops."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import AccelError
from .shared import DEVICE_HELP, end, numbers, place_arguments, record, write


def add_commands(benches: Any) -> None:
    """Add them to the subparsers of `bench`."""
    _bench_generate_arguments(benches.add_parser("generate", help="whole models, stock against optimized"))
    _bench_cache_arguments(benches.add_parser("cache", help="kinds of cache at long contexts, and prefix reuse"))
    _bench_gating_arguments(benches.add_parser("gating", help="what leaving out experts costs in perplexity"))
    _bench_quality_arguments(benches.add_parser("quality", help="what caches that evict cost in quality"))
    command = benches.add_parser("speculation", help="what checking guesses costs, and gains at a forced acceptance")
    command.add_argument("--model", default="tiny", help="as in bench generate (default: tiny)")
    command.add_argument("--points", default="1x1024", metavar="BxP,...", help="batch x prompt tokens")
    command.add_argument("--drafts", default="1,3,5,7", metavar="N,...", help="guesses a step (default 1,3,5,7)")
    command.add_argument("--acceptance", default="0.62,0.72", metavar="A,...", help="forced (default 0.62,0.72)")
    command.add_argument("--int4", action="store_true", help="with MixedPrecision, rounded to nearest")
    command.add_argument("--new-tokens", type=int, default=128, metavar="N", help="per sequence (default 128)")
    place_arguments(command, "bfloat16 on a GPU, float32 on a CPU by default")
    command.add_argument("--json", metavar="FILE", help="write the rows and the environment")
    command.set_defaults(run=bench_speculation)
    command = benches.add_parser("auto", help="whole calls that speculate as they see fit, against plain ones")
    command.add_argument("--model", default="tiny", help="tiny (default), or a checkpoint directory")
    drafts = "ngram,tiny-draft,mtp,self"
    command.add_argument("--drafts", default=drafts, metavar="DRAFT,...", help=f"as in `drafts` (default {drafts})")
    command.add_argument("--new-tokens", type=int, default=128, metavar="N", help="per sequence (default 128)")
    command.add_argument(
        "--calls",
        type=int,
        default=10,
        metavar="N",
        help="timed, of each kind (default 10); the first two may be left to plain decoding",
    )
    place_arguments(command, "bfloat16 on a GPU, float32 on a CPU by default")
    command.add_argument("--json", metavar="FILE", help="write the rows and the environment")
    command.set_defaults(run=bench_auto)
    command = benches.add_parser("host", help="loading a checkpoint, and a page table's change of length")
    command.add_argument("--model", default="tiny", help="tiny (default), or a checkpoint directory, quantised or not")
    command.add_argument("--device", default="auto", help=DEVICE_HELP)
    command.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs of each (default 3)")
    command.add_argument("--json", metavar="FILE", help="write the rows and the environment")
    command.set_defaults(run=bench_host)
    command = benches.add_parser("ops", help="single ops against their references")
    command.add_argument(
        "--op",
        metavar="OP,...",
        help="any of latent_attention, gqa, experts, router, norm_route, project, gated_project, rms_norm, "
        "int4_experts, int4_linear (default: all)",
    )
    place_arguments(command, "bfloat16 on a GPU, float32 on a CPU by default")
    command.add_argument("--json", metavar="FILE", help="write the rows and the environment")
    command.set_defaults(run=bench_ops)


def bench_generate(arguments: argparse.Namespace) -> int:
    from ..bench import generate, tables
    from ..bench.environment import resolve_device
    from ..bench.rows import Options
    from ..bench.shapes import Point

    if arguments.png:
        tables.require_pyplot()
    gpu = _is_gpu(resolve_device, arguments.device)
    points = arguments.points or ("1x1024,8x1024,32x1024,128x1024,1x8192,1x32768" if gpu else "1x64,1x2048")
    options = Options(
        model=arguments.model or ("v2-lite" if gpu else "tiny"),
        points=Point.parse_list(points),
        new_tokens=arguments.new_tokens,
        dtype=arguments.dtype,
        device=arguments.device,
        passes=arguments.passes,
        ablate=arguments.ablate,
        repeats=arguments.repeats,
        skip_stock=arguments.skip_stock,
        only_stock=arguments.only_stock,
        peers=arguments.peers,
        soak=arguments.soak,
        adaptive=tuple(arguments.adaptive.split(",")) if arguments.adaptive else (),
        int4=tuple(arguments.int4.split(",")) if arguments.int4 else (),
    )
    variants = len(options.configs()) + len(options.adaptive) + bool(options.int4) * (1 + len(options.adaptive))
    loads = 1 + bool(options.adaptive)
    with tables.progress(loads + len(options.points) * variants + options.peers) as step:
        result = generate.run(options, step, keep=record(arguments, tables.generate_table))
    result["command"] = arguments.command_line
    write(arguments, result)
    tables.console().print(tables.generate_table(result))
    if "soak" in result:
        tables.console().print(tables.soak_line(result["soak"]))
    return end(result["rows"], generate.exit_code(result["rows"]))


def bench_cache(arguments: argparse.Namespace) -> int:
    from ..bench import cache, tables
    from ..bench.environment import resolve_device
    from ..bench.shapes import Point

    gpu = _is_gpu(resolve_device, arguments.device)
    options = cache.Options(
        model=arguments.model or ("v2-lite" if gpu else "tiny"),
        points=Point.parse_list(arguments.points or ("1x8192,32x8192,1x32768,1x131072" if gpu else "1x1024")),
        variants=tuple(arguments.variants.split(",")) if arguments.variants else (),
        new_tokens=arguments.new_tokens,
        repeats=arguments.repeats,
        device=arguments.device,
        dtype=arguments.dtype,
    )
    count = len(options.points) * (len(options.variants) or len(cache.CONFIGS))
    with tables.progress(1 + count) as step:
        result = cache.run(options, step, keep=record(arguments, tables.cache_table))
    result["command"] = arguments.command_line
    write(arguments, result)
    tables.console().print(tables.cache_table(result))
    return end(result["rows"], cache.exit_code(result["rows"]))


def bench_gating(arguments: argparse.Namespace) -> int:
    from ..bench import gating, tables

    if arguments.png:
        tables.require_pyplot()
    try:
        targets = tuple(float(part) for part in arguments.targets.split(","))
    except ValueError as error:
        raise AccelError(f"targets are numbers such as 0.85,0.75; got {arguments.targets!r}") from error
    options = gating.Options(
        model=arguments.model,
        targets=targets,
        sensitivity=arguments.sensitivity,
        dtype=arguments.dtype,
        device=arguments.device,
        brute_force=arguments.brute_force,
    )
    calibrating = len(gating.CALIBRATING) * (arguments.sensitivity is None)
    with tables.progress(2 + calibrating + 4 * len(targets)) as step:
        result = gating.run(options, step)
    result["command"] = arguments.command_line
    write(arguments, result, tables.write_gating_png)
    tables.console().print(tables.gating_table(result))
    return 0


def bench_quality(arguments: argparse.Namespace) -> int:
    from ..bench import quality, tables

    if arguments.png:
        tables.require_pyplot()
    options = quality.Options(
        budgets=_percentages(arguments.budgets),
        policies=tuple(arguments.policies.split(",")),
        contexts=arguments.contexts,
        questions=arguments.questions,
        device=arguments.device,
        dtype=arguments.dtype,
    )
    with tables.progress(1 + len(list(quality.variants(options)))) as step:
        result = quality.run(options, step, keep=record(arguments, tables.quality_table))
    result["command"] = arguments.command_line
    write(arguments, result)
    tables.console().print(tables.quality_table(result))
    return end(result["rows"], quality.exit_code(result["rows"]))


def _percentages(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise AccelError(f"budgets are whole percentages, comma-separated, such as 75,50,25; got {text!r}") from error


def bench_ops(arguments: argparse.Namespace) -> int:
    from ..bench import generate, ops, tables

    chosen = arguments.op.split(",") if arguments.op else ops.OPS
    with tables.progress(ops.num_shapes(chosen, arguments.device)) as step:
        result = ops.run(chosen, arguments.device, arguments.dtype, step, record(arguments, tables.ops_table))
    result["command"] = arguments.command_line
    write(arguments, result)
    tables.console().print(tables.ops_table(result))
    return end(result["rows"], generate.exit_code(result["rows"]))


def bench_host(arguments: argparse.Namespace) -> int:
    from ..bench import host, tables

    keep = record(arguments, host.host_table)
    result = host.run(arguments.model, arguments.repeats, arguments.device, keep)
    result["command"] = arguments.command_line
    write(arguments, result)
    tables.console().print(host.host_table(result))
    return 0


def _is_gpu(resolve_device: Any, name: str) -> bool:
    try:
        return bool(resolve_device(name).type == "cuda")
    except AccelError:  # said in the rows
        return name.startswith("cuda")


def bench_speculation(arguments: argparse.Namespace) -> int:
    from ..bench import speculation, tables
    from ..bench.shapes import Point

    result = speculation.run(
        arguments.model, Point.parse_list(arguments.points), numbers(arguments.drafts, int),
        numbers(arguments.acceptance, float), arguments.new_tokens, arguments.device, arguments.dtype,
        keep=record(arguments, tables.speculation_table), int4=arguments.int4,
    )  # fmt: skip
    result["command"] = arguments.command_line
    write(arguments, result)
    tables.console().print(tables.speculation_table(result))
    return 0


def bench_auto(arguments: argparse.Namespace) -> int:
    from ..bench import auto, tables

    names = arguments.drafts.split(",")
    with tables.progress(1 + 3 * len(names)) as step:
        result = auto.run(
            arguments.model, names, arguments.new_tokens, arguments.calls, arguments.device, arguments.dtype, step,
            record(arguments, tables.auto_table),
        )  # fmt: skip
    result["command"] = arguments.command_line
    write(arguments, result)
    tables.console().print(tables.auto_table(result))
    return auto.exit_code(result)


def _bench_generate_arguments(command: argparse.ArgumentParser) -> None:
    models = (
        "v2-lite, v3-4layer, deepseek-moe-16b, llm-7b, r1-distill-qwen-7b (random weights), tiny, "
        "or a checkpoint directory"
    )
    command.add_argument("--model", help=f"{models} (default: v2-lite on a GPU, tiny on a CPU)")
    command.add_argument("--points", metavar="BxP,...", help="batch x prompt tokens (default: 1x64,1x2048 on a CPU)")
    command.add_argument("--new-tokens", type=int, default=64, metavar="N", help="per sequence (default 64)")
    place_arguments(command, "bfloat16 on a GPU, float32 on a CPU by default")
    command.add_argument(
        "--passes",
        default="all",
        help="any of attention, experts, layers, kv_cache, cuda_graphs, comma-separated (default: all)",
    )
    command.add_argument(
        "--adaptive",
        metavar="TARGET,...",
        help="also AdaptiveTopK: 0.75, with a batch budget 0.75@8, or top1; routers calibrated on random tokens",
    )
    command.add_argument(
        "--int4",
        nargs="?",
        const="experts,mlp",
        metavar="TARGET,...",
        help="also MixedPrecision of these targets (experts,mlp), rounded to nearest, and so each adaptive variant",
    )
    command.add_argument("--ablate", action="store_true", help="also each pass alone")
    command.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs of each (default 3)")
    command.add_argument("--peers", action="store_true", help="also vLLM on the same weights, if it is installed")
    command.add_argument("--soak", type=int, default=0, metavar="N", help="then N calls of mixed size: memory, times")
    command.add_argument("--json", metavar="FILE", help="write the rows and the environment")
    command.add_argument("--png", metavar="FILE", help="draw the times (needs matplotlib)")
    either = command.add_mutually_exclusive_group()
    either.add_argument("--skip-stock", action="store_true", help="check against stock, but do not time it")
    either.add_argument("--only-stock", action="store_true", help="time stock alone")
    command.set_defaults(run=bench_generate)


def _bench_cache_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", help="as in bench generate (default: v2-lite on a GPU, tiny on a CPU)")
    command.add_argument("--points", metavar="BxC,...", help="batch x context tokens (default: 1x1024 on a CPU)")
    names = "full, fp8_e4m3, fp8_e5m2, reuse_prefix, window_50, top_attention_50"
    command.add_argument("--variants", metavar="NAME,...", help=f"any of {names} (default: all)")
    command.add_argument("--new-tokens", type=int, default=64, metavar="N", help="per sequence (default 64)")
    place_arguments(command, "bfloat16 on a GPU, float32 on a CPU by default")
    command.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs of each (default 3)")
    command.add_argument("--json", metavar="FILE", help="write the rows and the environment")
    command.set_defaults(run=bench_cache)


def _bench_gating_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", default="tiny", help="tiny (default), or a checkpoint directory")
    command.add_argument("--targets", default="0.85,0.75,0.625,0.5", metavar="T,...", help="default: %(default)s")
    command.add_argument("--sensitivity", metavar="FILE", help="of `calibrate` (default: calibrate on Python source)")
    place_arguments(command, "bfloat16 on a GPU, float32 on a CPU by default")
    command.add_argument("--brute-force", action="store_true", help="also leave out each rank of each layer for real")
    command.add_argument("--json", metavar="FILE", help="write the rows and the environment")
    command.add_argument("--png", metavar="FILE", help="draw them (needs matplotlib)")
    command.set_defaults(run=bench_gating)


def _bench_quality_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--budgets", default="100,75,50,25", metavar="PERCENT,...", help="(default: 100,75,50,25)")
    command.add_argument(
        "--policies", default="window,top_attention,entropy", metavar="NAME,...", help="(default: all)"
    )
    command.add_argument("--contexts", type=int, default=20, metavar="N", help="of 2,048 tokens (default 20)")
    command.add_argument("--questions", type=int, default=32, metavar="N", help="at most; 0 asks none (default 32)")
    place_arguments(command, "bfloat16 on a GPU, float32 on a CPU by default")
    command.add_argument("--json", metavar="FILE", help="write the rows and the environment")
    command.add_argument("--png", metavar="FILE", help="draw quality against bytes (needs matplotlib)")
    command.set_defaults(run=bench_quality)
