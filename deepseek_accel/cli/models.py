"""The commands about one model: demo, plan, calibrate, quantize, drafts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import AccelError
from .shared import DEVICE_HELP, place_arguments


def add_commands(commands: Any) -> None:
    """Add them to the subparsers of the command line."""
    command = commands.add_parser("demo", help="the bundled model, stock and optimized side by side")
    command.add_argument("--prompt", help="text to continue (default: 2,000 tokens of code the model has not seen)")
    command.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="tokens to generate (default 64)")
    command.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs of each (default 3)")
    place_arguments(command, "float32 (default), bfloat16 or float16")
    command.add_argument("--json", action="store_true", help="print one JSON object instead")
    command.set_defaults(run=demo)

    command = commands.add_parser("plan", help="what optimize() would do to a checkpoint, without loading its weights")
    command.add_argument("model_dir", metavar="MODEL_DIR", help="the directory of a downloaded checkpoint, or tiny")
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
    place_arguments(command, "bfloat16 on a GPU, float32 on a CPU by default")
    command.set_defaults(run=calibrate)
    _quantize_arguments(commands.add_parser("quantize", help="write a checkpoint with MLPs and experts in four bits"))
    command = commands.add_parser("drafts", help="rank drafts for speculative decoding of a model")
    command.add_argument("target", metavar="TARGET", help="tiny, or the directory of a checkpoint")
    command.add_argument("drafts", metavar="DRAFT", nargs="+", help="ngram, mtp, self, tiny-draft, or a directory")
    command.add_argument("--text", metavar="FILE", help="what to go on from (default: the bundled held-out code)")
    command.add_argument("--new-tokens", type=int, default=64, metavar="N", help="per prompt (default 64)")
    command.add_argument("--prompts", type=int, default=8, metavar="N", help="cut from the text (default 8)")
    place_arguments(command, "bfloat16 on a GPU, float32 on a CPU by default")
    command.add_argument("--json", action="store_true", help="print one JSON object instead")
    command.set_defaults(run=drafts)


def demo(arguments: argparse.Namespace) -> int:
    from ..bench import demo, tables

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
    from ..bench import tables

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

    from .. import api, families
    from ..bench.environment import dtype_name, resolve_device
    from ..bench.floor import cache_of
    from ..config import OptimizeConfig
    from ..errors import UnsupportedModelError
    from ..quantization.files import local_config

    options = OptimizeConfig.lossless() if config is None else OptimizeConfig.from_json(config)
    device = resolve_device(device_name)
    model_config = local_config(_directory(directory))
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


def _directory(name: str) -> str:
    """A checkpoint directory as given, or that of the bundled model."""
    from ..models import path

    return str(path()) if name == "tiny" else name


def quantize(arguments: argparse.Namespace) -> int:
    from ..bench import tables
    from ..errors import PlanError
    from ..quantization.write import write_quantized

    if arguments.method == "rtn" and (arguments.text or arguments.calibration or arguments.no_feedback):
        raise PlanError("`--method rtn` rounds to nearest: --text, --calibration and --no-feedback do nothing there")
    if not arguments.shard_gb > 0:
        raise PlanError(f"--shard-gb must be above 0, got {arguments.shard_gb:g}")
    arguments.model_dir = _directory(arguments.model_dir)
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
    from transformers import AutoTokenizer

    from ..bench.environment import resolve_device
    from ..errors import PlanError
    from ..loading import load_directory
    from ..quantization.awq import calibrate_awq
    from ..quantization.text import windows
    from ..quantization.write import open_source

    if not arguments.text:
        raise PlanError("AWQ needs text: `--text FILE ...`, of the kind the model will see. Or `--method rtn`.")
    targets = arguments.targets.split(",")
    open_source(arguments.model_dir, arguments.out_dir, arguments.group_size, targets, arguments.skip)
    device = resolve_device(arguments.device)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_dir)
    data = windows(arguments.text, tokenizer, arguments.samples)
    model = load_directory(arguments.model_dir).to(device)
    return calibrate_awq(
        model,
        data,
        group_size=arguments.group_size,
        targets=targets,
        skip=arguments.skip,
        feedback=not arguments.no_feedback,
        folder=arguments.calibration or f"{arguments.out_dir.rstrip('/')}.calibration",
    )


def calibrate(arguments: argparse.Namespace) -> int:
    from ..bench import gating, tables
    from ..gating.sensitivity import temper_of

    if not Path(arguments.out).absolute().parent.is_dir():
        raise AccelError(f"cannot write {arguments.out!r}: there is no such directory")
    with tables.progress(1 + len(gating.CALIBRATING)) as step:
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


def drafts(arguments: argparse.Namespace) -> int:
    from ..bench import drafts as ranking
    from ..bench import tables

    with tables.progress(1 + ranking.STEPS * len(arguments.drafts)) as step:
        result = ranking.run(
            arguments.target, arguments.drafts, arguments.text, arguments.prompts, arguments.new_tokens,
            arguments.device, arguments.dtype, step,
        )  # fmt: skip
    print(tables.to_json(result)) if arguments.json else tables.console().print(tables.drafts_table(result))
    return 0 if any(row["acceptance"] is not None for row in result["rows"]) else 1


def _quantize_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("model_dir", metavar="MODEL_DIR", help="the directory of a 16-bit checkpoint, or tiny")
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
