"""The command `deepseek-accel`.

Exit codes: 0 done, 1 a comparison failed, 2 wrong input, 3 a wrong result was not timed.
Results go to stdout, progress and messages to stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import AccelError

DEVICE_HELP = "auto (default), cpu, cuda or cuda:N"


def demo(arguments: argparse.Namespace) -> int:
    from .bench import demo, tables

    with tables.progress(demo.num_steps(arguments.repeats)) as step:
        result = demo.run(
            arguments.prompt, arguments.max_new_tokens, arguments.device, arguments.dtype, arguments.repeats, step
        )
    if arguments.json:
        print(tables.to_json(result))
    else:
        console = tables.console()
        for part in tables.demo_view(result):
            console.print(part)
    return demo.exit_code(result)


def plan(arguments: argparse.Namespace) -> int:
    from .bench import tables

    result = checkpoint_plan(arguments.model_dir, arguments.config, arguments.device)
    if arguments.json:
        print(tables.to_json(result))
    else:
        console = tables.console()
        for part in tables.plan_view(result):
            console.print(part)
    return 0


def checkpoint_plan(directory: str, config: str | None = None, device_name: str = "auto") -> dict[str, Any]:
    """The plan for a local checkpoint, and its sizes. No weight is read and none of the checkpoint's code is run."""
    import torch
    from transformers import AutoModelForCausalLM

    from . import api, families
    from .bench.environment import dtype_name, resolve_device
    from .bench.floor import cache_of
    from .config import OptimizeConfig
    from .errors import UnsupportedModelError
    from .quantization.files import local_config

    options = OptimizeConfig.lossless() if config is None else OptimizeConfig.from_json(config)
    device = resolve_device(device_name)
    model_config = local_config(directory)
    remarks = []
    if (quantized := getattr(model_config, "quantization_config", None)) is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        remarks.append(f"the checkpoint is stored as {method}; sizes are of the weights in the dtype above")
        del model_config.quantization_config
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config).eval()
    except ValueError as error:
        raise UnsupportedModelError(f"transformers has no language model for {directory!r}: {error}") from error
    place(model, device)
    intended = api.plan(model, options)
    family = families.find(model)
    layers = len(family.layers(model))
    cache = cache_of(options).describe(model, family)["bytes_per_token_and_layer"]
    return {
        "model_dir": directory,
        "model_type": intended.model_type,
        "architecture": type(model).__name__,
        "layers": layers,
        "device": str(device),
        "dtype": dtype_name(model.dtype),
        "parameters": sum(p.numel() for p in model.parameters()),
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "cache_bytes_per_token": cache * layers,
        "cache_bytes_per_token_and_layer": cache,
        "remarks": remarks,
        "passes": intended.rows(),
    }


def place(model: Any, device: Any) -> None:
    """Give every parameter of a model on "meta" the device, without the memory: one number, seen from every index.

    Passes ask the parameters where the model is, and plan for that device.
    """
    from torch import nn

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                number = parameter.new_zeros((), device=device)
                module._parameters[name] = nn.Parameter(number.expand(parameter.shape), requires_grad=False)
    model.tie_weights()


def quantize(arguments: argparse.Namespace) -> int:
    from .bench import tables
    from .errors import PlanError
    from .quantization.write import write_quantized

    if arguments.method == "rtn" and (arguments.text or arguments.calibration or arguments.no_feedback):
        raise PlanError("`--method rtn` rounds to nearest: --text, --calibration and --no-feedback do nothing there")
    if not arguments.shard_gb > 0:
        raise PlanError(f"--shard-gb must be above 0, got {arguments.shard_gb:g}")
    calibration = _calibrate(arguments) if arguments.method == "awq" else None
    written = write_quantized(
        arguments.model_dir,
        arguments.out_dir,
        calibration=calibration,
        group_size=arguments.group_size,
        targets=arguments.targets.split(","),
        skip=arguments.skip,
        shard_bytes=int(arguments.shard_gb * 1e9),
    )
    rows = [] if calibration is None else calibration.rows
    if arguments.json:
        print(tables.to_json({"method": arguments.method, "layers": rows, **vars(written)}))
        return 0
    for row in rows:
        print(
            f"layer {row['layer']}: output {row['output_snr_db']:.1f} dB, weights {row['weight_snr_db']:.1f} dB, "
            f"KL {row['weight_kl']:.4f}, alpha {row['alpha']}, experts {row['experts_hit']} of {row['experts']} met"
        )
    for module, why in written.kept.items():
        print(f"16 bits: {module}: {why}")
    print(
        f"{written.directory}: {written.quantized:,} weights in 4 bits, {written.bytes_before:,} bytes before, "
        f"{written.bytes_after:,} now, {written.files} file(s)"
    )
    return 0


def _calibrate(arguments: argparse.Namespace) -> Any:
    """The calibration for `quantize`; its finished layers wait beside the output until that is written."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .bench.environment import resolve_device
    from .errors import PlanError
    from .quantization.awq import calibrate_awq
    from .quantization.text import windows
    from .quantization.write import open_source

    if not arguments.text:
        raise PlanError("AWQ needs text: `--text FILE ...`, of the kind the model will see. Or `--method rtn`.")
    targets = arguments.targets.split(",")
    open_source(arguments.model_dir, arguments.out_dir, arguments.group_size, targets, arguments.skip)
    device = resolve_device(arguments.device)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_dir)
    data = windows(arguments.text, tokenizer, arguments.samples)
    model = AutoModelForCausalLM.from_pretrained(arguments.model_dir, dtype="auto").to(device).eval()
    return calibrate_awq(
        model,
        data,
        group_size=arguments.group_size,
        targets=targets,
        skip=arguments.skip,
        feedback=not arguments.no_feedback,
        folder=arguments.calibration or f"{arguments.out_dir.rstrip('/')}.calibration",
    )


def bench_generate(arguments: argparse.Namespace) -> int:
    from .bench import generate, tables
    from .bench.environment import resolve_device
    from .bench.shapes import Point

    if arguments.png:
        tables.require_pyplot()
    gpu = _is_gpu(resolve_device, arguments.device)
    points = arguments.points or ("1x1024,8x1024,32x1024,128x1024,1x8192,1x32768" if gpu else "1x64,1x2048")
    options = generate.Options(
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
        int4=arguments.int4,
    )
    variants = len(options.configs()) + len(options.adaptive) + options.int4 * (1 + len(options.adaptive))
    loads = 1 + bool(options.adaptive)
    with tables.progress(loads + len(options.points) * variants + options.peers) as step:
        result = generate.run(options, step, keep=_record(arguments, tables.generate_table))
    result["command"] = arguments.command_line
    _write(arguments, result)
    tables.console().print(tables.generate_table(result))
    if "soak" in result:
        tables.console().print(tables.soak_line(result["soak"]))
    return _end(result["rows"], generate.exit_code(result["rows"]))


def bench_cache(arguments: argparse.Namespace) -> int:
    from .bench import cache, tables
    from .bench.environment import resolve_device
    from .bench.shapes import Point

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
        result = cache.run(options, step, keep=_record(arguments, tables.cache_table))
    result["command"] = arguments.command_line
    _write(arguments, result)
    tables.console().print(tables.cache_table(result))
    return _end(result["rows"], cache.exit_code(result["rows"]))


def bench_gating(arguments: argparse.Namespace) -> int:
    from .bench import gating, tables

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
    with tables.progress(2 + 4 * len(targets)) as step:
        result = gating.run(options, step)
    result["command"] = arguments.command_line
    _write(arguments, result, tables.write_gating_png)
    tables.console().print(tables.gating_table(result))
    return 0


def calibrate(arguments: argparse.Namespace) -> int:
    from .bench import gating, tables
    from .gating.sensitivity import temper_of

    if not Path(arguments.out).absolute().parent.is_dir():
        raise AccelError(f"cannot write {arguments.out!r}: there is no such directory")
    with tables.progress(3) as step:
        found = gating.calibrate_directory(
            arguments.model_dir, arguments.text, arguments.device, arguments.dtype, arguments.max_tokens, step
        )
    found.save(arguments.out)
    print(f"{arguments.out}: {found!r}")
    for target in (0.85, 0.75, 0.5):
        rule = ("gradient", 1, temper_of(target))
        kept = found.kept(found.threshold(target, *rule), *rule)
        print(f"target {target}: mean experts by layer {', '.join(f'{value:.2f}' for value in kept.tolist())}")
    return 0


def bench_quality(arguments: argparse.Namespace) -> int:
    from .bench import quality, tables

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
        result = quality.run(options, step)
    result["command"] = arguments.command_line
    _write(arguments, result)
    tables.console().print(tables.quality_table(result))
    return _end(result["rows"], quality.exit_code(result["rows"]))


def _percentages(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise AccelError(f"budgets are whole percentages, comma-separated, such as 75,50,25; got {text!r}") from error


def bench_ops(arguments: argparse.Namespace) -> int:
    from .bench import generate, op_cases, ops, tables

    chosen = arguments.op.split(",") if arguments.op else op_cases.OPS
    with tables.progress(ops.num_shapes(chosen, arguments.device)) as step:
        result = ops.run(chosen, arguments.device, arguments.dtype, step)
    result["command"] = arguments.command_line
    _write(arguments, result)
    tables.console().print(tables.ops_table(result))
    return _end(result["rows"], generate.exit_code(result["rows"]))


def _is_gpu(resolve_device: Any, name: str) -> bool:
    try:
        return bool(resolve_device(name).type == "cuda")
    except AccelError:  # said in the rows
        return name.startswith("cuda")


def bench_speculation(arguments: argparse.Namespace) -> int:
    from .bench import speculation, tables
    from .bench.shapes import Point

    result = speculation.run(
        arguments.model, Point.parse_list(arguments.points), _numbers(arguments.drafts, int),
        _numbers(arguments.acceptance, float), arguments.new_tokens, arguments.device, arguments.dtype,
        keep=_record(arguments, tables.speculation_table), int4=arguments.int4,
    )  # fmt: skip
    result["command"] = arguments.command_line
    _write(arguments, result)
    tables.console().print(tables.speculation_table(result))
    return 0


def drafts(arguments: argparse.Namespace) -> int:
    from .bench import drafts as ranking
    from .bench import tables

    result = ranking.run(
        arguments.target, arguments.drafts, arguments.text, arguments.prompts, arguments.new_tokens, arguments.device,
        arguments.dtype,
    )  # fmt: skip
    print(tables.to_json(result)) if arguments.json else tables.console().print(tables.drafts_table(result))
    return 0 if any(row["acceptance"] is not None for row in result["rows"]) else 1


def _numbers(text: str, kind: Any) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise AccelError(f"not a list of numbers: {text!r}") from None


def _record(arguments: argparse.Namespace, table: Any) -> Any:
    """What a bench tells its rows to while it runs."""
    from .bench.record import Record

    return Record(arguments.json, arguments.command_line, table)


def _write(arguments: argparse.Namespace, result: dict[str, Any], draw: Any = None) -> None:
    from .bench import tables

    try:
        if arguments.json:
            tables.write_json(arguments.json, result)
        if getattr(arguments, "png", None):
            (draw or tables.write_png)(arguments.png, result)
    except OSError as error:
        print(f"deepseek-accel: could not write: {error}", file=sys.stderr)


def _end(rows: Sequence[dict[str, Any]], code: int) -> int:
    if code == 3:
        wrong = sum(row["status"] == "wrong" for row in rows)
        print(f"deepseek-accel: {wrong} result(s) are wrong and were not timed; see the table", file=sys.stderr)
    return code


def parser() -> argparse.ArgumentParser:
    from . import __version__

    top = argparse.ArgumentParser(
        prog="deepseek-accel",
        description="Make Hugging Face DeepSeek models fast in place.",
        epilog="exit codes: 0 done, 1 a comparison failed, 2 wrong input, 3 a wrong result was not timed",
    )
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = commands.add_parser("demo", help="the bundled model, stock and optimized side by side")
    command.add_argument("--prompt", help="text to continue (default: 2,000 tokens of code the model has not seen)")
    command.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="tokens to generate (default 64)")
    command.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs of each (default 3)")
    _place_arguments(command, "float32 (default), bfloat16 or float16")
    command.add_argument("--json", action="store_true", help="print one JSON object instead")
    command.set_defaults(run=demo)

    command = commands.add_parser("plan", help="what optimize() would do to a checkpoint, without loading its weights")
    command.add_argument("model_dir", metavar="MODEL_DIR", help="the directory of a downloaded checkpoint")
    command.add_argument("--config", metavar="FILE_OR_JSON", help="such as '{\"attention\": {}}' (default: lossless)")
    command.add_argument("--device", default="auto", help=DEVICE_HELP)
    command.add_argument("--json", action="store_true", help="print one JSON object instead")
    command.set_defaults(run=plan)

    command = commands.add_parser("calibrate", help="measure a model's routers for AdaptiveTopK, into one file")
    command.add_argument("model_dir", metavar="MODEL_DIR", help="a checkpoint directory, or tiny")
    command.add_argument("out", metavar="OUT", help="the safetensors file to write")
    command.add_argument(
        "--text", metavar="FILE", action="append", help="text to calibrate on, again for more (default: Python source)"
    )
    command.add_argument("--max-tokens", type=int, default=65536, metavar="N", help="use at most N (default 65536)")
    _place_arguments(command, "bfloat16 on a GPU, float32 on a CPU by default")
    command.set_defaults(run=calibrate)
    _quantize_arguments(commands.add_parser("quantize", help="write a checkpoint with MLPs and experts in four bits"))
    command = commands.add_parser("drafts", help="rank drafts for speculative decoding of a model")
    command.add_argument("target", metavar="TARGET", help="tiny, or the directory of a checkpoint")
    command.add_argument("drafts", metavar="DRAFT", nargs="+", help="ngram, mtp, self, tiny-draft, or a directory")
    command.add_argument("--text", metavar="FILE", help="what to go on from (default: the bundled held-out code)")
    command.add_argument("--new-tokens", type=int, default=64, metavar="N", help="per prompt (default 64)")
    command.add_argument("--prompts", type=int, default=8, metavar="N", help="cut from the text (default 8)")
    _place_arguments(command, "bfloat16 on a GPU, float32 on a CPU by default")
    command.add_argument("--json", action="store_true", help="print one JSON object instead")
    command.set_defaults(run=drafts)

    benches = commands.add_parser("bench", help="time whole models or single ops").add_subparsers(
        title="benches", required=True, metavar="BENCH"
    )
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
    _place_arguments(command, "bfloat16 on a GPU, float32 on a CPU by default")
    command.add_argument("--json", metavar="FILE", help="write the rows and the environment")
    command.set_defaults(run=bench_speculation)
    command = benches.add_parser("ops", help="single ops against their references")
    command.add_argument(
        "--op", metavar="OP,...", help="latent_attention, gqa, experts, router, rms_norm (default: all)"
    )
    _place_arguments(command, "bfloat16 on a GPU, float32 on a CPU by default")
    command.add_argument("--json", metavar="FILE", help="write the rows and the environment")
    command.set_defaults(run=bench_ops)
    return top


def _quantize_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("model_dir", metavar="MODEL_DIR", help="the directory of a 16-bit checkpoint")
    command.add_argument("out_dir", metavar="OUT_DIR", help="a directory to make, in the layout of AutoAWQ")
    command.add_argument("--method", choices=("awq", "rtn"), default="awq", help="awq (default) or round to nearest")
    command.add_argument("--text", nargs="+", metavar="FILE", help="text files to calibrate on (awq)")
    command.add_argument("--samples", type=int, default=64, metavar="N", help="1,024-token pieces of it (default 64)")
    command.add_argument("--group-size", type=int, default=128, metavar="N", help="inputs to a scale (default 128)")
    command.add_argument("--targets", default="experts,mlp", help="experts (routed and shared), mlp (default: both)")
    command.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="modules that stay, or expressions")
    command.add_argument("--no-feedback", action="store_true", help="awq without feedback between columns")
    command.add_argument("--calibration", metavar="DIR", help="where finished layers go (default: OUT_DIR.calibration)")
    command.add_argument("--shard-gb", type=float, default=5.0, metavar="GB", help="most of one file (default 5)")
    command.add_argument("--device", default="auto", help=DEVICE_HELP)
    command.add_argument("--json", action="store_true", help="print one JSON object instead")
    command.set_defaults(run=quantize)


def _bench_generate_arguments(command: argparse.ArgumentParser) -> None:
    models = (
        "v2-lite, v3-4layer, deepseek-moe-16b, llm-7b, r1-distill-qwen-7b (random weights), tiny, "
        "or a checkpoint directory"
    )
    command.add_argument("--model", help=f"{models} (default: v2-lite on a GPU, tiny on a CPU)")
    command.add_argument("--points", metavar="BxP,...", help="batch x prompt tokens (default: 1x64,1x2048 on a CPU)")
    command.add_argument("--new-tokens", type=int, default=64, metavar="N", help="per sequence (default 64)")
    _place_arguments(command, "bfloat16 on a GPU, float32 on a CPU by default")
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
        "--int4", action="store_true", help="also MixedPrecision, rounded to nearest, and so each adaptive variant"
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
    _place_arguments(command, "bfloat16 on a GPU, float32 on a CPU by default")
    command.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs of each (default 3)")
    command.add_argument("--json", metavar="FILE", help="write the rows and the environment")
    command.set_defaults(run=bench_cache)


def _bench_gating_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", default="tiny", help="tiny (default), or a checkpoint directory")
    command.add_argument("--targets", default="0.85,0.75,0.625,0.5", metavar="T,...", help="default: %(default)s")
    command.add_argument("--sensitivity", metavar="FILE", help="of `calibrate` (default: calibrate on Python source)")
    _place_arguments(command, "bfloat16 on a GPU, float32 on a CPU by default")
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
    _place_arguments(command, "bfloat16 on a GPU, float32 on a CPU by default")
    command.add_argument("--json", metavar="FILE", help="write the rows and the environment")
    command.add_argument("--png", metavar="FILE", help="draw quality against bytes (needs matplotlib)")
    command.set_defaults(run=bench_quality)


def _place_arguments(command: argparse.ArgumentParser, dtypes: str) -> None:
    command.add_argument("--device", default="auto", help=DEVICE_HELP)
    command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=dtypes)


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
