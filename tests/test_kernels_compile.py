"""Every kernel compiles, without a GPU, for the GPUs we support, fits their shared memory and hardly spills.

A kernel module offers `compile_cases()`: tuples (name, kernel, signature, constexprs, options). Options are the
compiler's `num_warps` and `num_stages`, and optionally `attrs` (argument properties), `capability` (the one GPU a case
is laid out for; else all of `SHARED_BYTES`) and `max_spill_bytes` (else `MAX_SPILL_BYTES`).
"""

import functools
import importlib
import pkgutil
import re
import subprocess

import pytest

import deepseek_accel.kernels

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.kernels

# Shared memory of a block on A100, L4 / RTX 4090, H100 / H200, B200.
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
# Per thread. The attention kernels hold an accumulator of 64 x 512 in 256 threads: half of all registers.
MAX_SPILL_BYTES = 512

ATTENTION_KERNELS = [
    ("combine", "combine_kernel"),
    ("combine_project", "combine_project_kernel"),
    ("gqa_attention", "gqa_attention_kernel"),
    ("mla_attention", "mla_attention_kernel"),
]
# Kernels that must be among the discovered cases, so that none silently loses its cases.
KERNELS = [
    *ATTENTION_KERNELS,
    ("adaptive_topk", "settle_kernel"),
    ("advance", "advance_kernel"),
    ("claim", "claim_kernel"),
    ("key_mass", "key_mass_kernel"),
    ("entry_write", "entry_write_kernel"),
    ("experts_pairs", "pair_gate_up_kernel"),
    ("experts_pairs", "pair_down_kernel"),
    ("experts_order", "sort_kernel"),
    ("experts_tiles", "tile_gate_up_kernel"),
    ("experts_tiles", "tile_down_kernel"),
    ("experts_order", "combine_kernel"),
    ("int4", "dequantize_kernel"),
    ("int4_dots", "int4_dots_kernel"),
    ("int4_mma", "int4_mma_kernel"),
    ("int4_mma_pairs", "int4_mma_down_kernel"),
    ("int4_pairs", "int4_pair_gate_up_kernel"),
    ("int4_pairs", "int4_pair_down_kernel"),
    ("int4_tiles", "int4_tiles_kernel"),
    ("latent_write", "latent_write_kernel"),
    ("next_token", "best_of_block_kernel"),
    ("next_token", "next_token_kernel"),
    ("prefill_attention", "prefill_attention_kernel"),
    ("prefill_parts", "merge_kernel"),
    ("prefill_parts", "whole_keys_kernel"),
    ("prefill_write", "prefill_write_kernel"),
    ("projection", "project_kernel"),
    ("projection", "gated_project_kernel"),
    ("projection", "silu_mul_kernel"),
    ("rms_norm", "rms_norm_kernel"),
    ("router", "route_kernel"),
    ("router", "norm_route_kernel"),
    ("router_logits", "router_logits_kernel"),
]


# Kernels that are only ever chosen on Hopper.
HOPPER_KERNELS = [("experts_tma", "tma_gate_up_kernel"), ("experts_tma", "tma_down_kernel")]


@functools.cache
def discovered_cases():
    cases = []
    for module_info in pkgutil.iter_modules(deepseek_accel.kernels.__path__):
        module = importlib.import_module(f"deepseek_accel.kernels.{module_info.name}")
        for name, kernel, signature, constexprs, options in getattr(module, "compile_cases", list)():
            options = dict(options)
            only = options.pop("capability", None)
            for capability in SHARED_BYTES if only is None else [only]:
                cases.append((f"{name} sm_{capability}", capability, kernel, signature, constexprs, options))
    return cases


def spill_bytes(cubin, path):
    """The stack frame per thread, by the cuobjdump in Triton's package: what does not fit into registers."""
    path.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(size) for size in re.findall(r"STACK:(\d+)", usage))


@pytest.mark.parametrize("module, kernel", KERNELS)
def test_kernel_has_cases(module, kernel):
    function = getattr(importlib.import_module(f"deepseek_accel.kernels.{module}"), kernel)
    assert {case[1] for case in discovered_cases() if case[2] is function} >= {80, 90, 100}


@pytest.mark.parametrize("module, kernel", HOPPER_KERNELS)
def test_hopper_kernel_has_cases(module, kernel):
    function = getattr(importlib.import_module(f"deepseek_accel.kernels.{module}"), kernel)
    assert {case[1] for case in discovered_cases() if case[2] is function} == {90}


@pytest.mark.parametrize("case", discovered_cases(), ids=lambda case: case[0].replace(" ", "-"))
def test_kernel_compiles(case, tmp_path):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    _, capability, kernel, signature, constexprs, options = case
    limit = options.get("max_spill_bytes", MAX_SPILL_BYTES)
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs, options.get("attrs")),
        target=GPUTarget("cuda", capability, 32),
        options={name: value for name, value in options.items() if name.startswith("num_")},
    )
    assert compiled.metadata.shared <= SHARED_BYTES[capability]
    assert spill_bytes(compiled.asm["cubin"], tmp_path / "kernel.cubin") <= limit


def lanes_of_mma(kernel, signature, constexprs, options, capability, num_warps):
    """The layouts that Triton gave to what goes through assembly, each with the numbers of the tensors that have it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs, options["attrs"]),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": 3},
    )
    text = compiled.asm["ttgir"]
    assert text.count("mma.sync") and compiled.asm["ptx"].count("mma.sync.aligned.m16n8k16")
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    lines = [line for line in text.splitlines() if "elementwise_inline_asm" in line]
    found = {tensor for line in lines for tensor in re.findall(r"tensor<(\d+)x\w+, (#\w+)>", line)}
    assert found
    return {(int(count), layouts[name]) for count, name in found}


@pytest.mark.parametrize(
    "name, capability", [("pairs-1", 80), ("gate_up-1", 80), ("down-1", 100), ("dense-2", 90), ("down-v2-lite-1", 90)]
)
def test_a_number_of_a_tensor_is_in_the_lane_that_mma_expects(name, capability):
    """`int4_mma` relies on it: number i is in lane i % 32 of warp i // 32, in each tensor that assembly takes or gives.
    Nothing in Triton's language says so; if a version lays them out otherwise, products are silently wrong."""
    cases = {(case[0], case[1]): case[2:] for case in discovered_cases()}
    case = cases[f"int4_mma_{name} sm_{capability}", capability]
    warps = case[3]["num_warps"]

    def plain(count, layout, warps):
        expected = ("sizePerThread = [1]", "threadsPerWarp = [32]", f"warpsPerCTA = [{warps}]", "order = [0]")
        return count == 32 * warps and layout.startswith("#ttg.blocked") and all(part in layout for part in expected)

    lanes = lanes_of_mma(*case, capability, warps)
    assert all(plain(*lane, warps) for lane in lanes)
    for part in ("sizePerThread", "threadsPerWarp"):  # the check can fail
        assert not any(plain(count, layout.replace(part, "other"), warps) for count, layout in lanes)


def loads_and_products(cubin, path):
    """The main loop of an `int4_mma` kernel in machine code, by the nvdisasm in Triton's package: W a load of 16 bytes
    of weights, s one of `upper_bits`, h a product."""
    path.write_bytes(cubin)
    text = subprocess.run(
        [triton.knobs.nvidia.nvdisasm.path, "-c", str(path)], capture_output=True, text=True, check=True
    ).stdout
    found, labels = "", {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        operation = re.match(r"\s*/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+ )?(\S+)", line)
        name = operation[1] if operation else ""
        if name.startswith("LDG") and ".NA.128" in name:
            found += "W"
        elif name == "LDS":
            found += "s"
        elif name.startswith("HMMA"):
            found += "h"
        elif name.startswith("BRA") and (target := re.search(r"\.L_x_\d+", line)) and target[0] in labels:
            body = found[labels[target[0]] :]
            if "h" in body:
                return body
    raise AssertionError(f"no loop with products in it: {found}")


@pytest.mark.parametrize(
    "case",
    [case for case in discovered_cases() if case[0].startswith("int4_mma") and case[1] in (80, 90)],
    ids=lambda case: case[0].replace(" ", "-"),
)
def test_weights_are_asked_for_before_the_products_of_the_step(case, tmp_path):
    """What `upper_bits` is for. ptxas moved these loads behind the products once, and every step waited for them."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    _, capability, kernel, signature, constexprs, options = case
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs, options["attrs"]),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": options["num_warps"], "num_stages": 3},
    )
    body = loads_and_products(compiled.asm["cubin"], tmp_path / "kernel.cubin")
    loads = 4 if constexprs.get("GATED") or constexprs["ROWS"] == 32 else 2
    assert re.fullmatch(f"(W{{{loads}}}s)+", body.replace("h", "")), body
