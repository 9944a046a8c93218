"""What the split-KV attention kernels share: dividing the keys, the running softmax, and merging the partial results.

Flash decoding (https://pytorch.org/blog/flash-decoding/): several programs each attend to a part of a row's keys and
write a normalised partial output and the log2 of its softmax denominator; `combine_kernel` then weights the parts.
All exponentials are base 2, so scores arrive multiplied by log2(e).
"""

import functools
import inspect
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import launching

LOG2_E = 1.4426950408889634
MAX_SPLITS = 128

# Shared memory a block may use, by compute capability, in bytes. Unknown GPUs get the smallest.
SHARED_BYTES = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10, (10, 3): 227 << 10}
SMALLEST_SHARED_BYTES = 99 << 10
SCRATCH_BYTES = 8 << 10  # for the weights of a block and for layout changes


class LaunchOptions(NamedTuple):
    """How a kernel is cut into programs. A program has `block_rows` (query, head) pairs, reads `block_keys` at once."""

    block_rows: int
    block_keys: int
    num_warps: int
    num_stages: int


class Launch(NamedTuple):
    """Everything one kernel launch needs. `compile_case` turns it into the compiler's input without a GPU."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int

    def run(self) -> None:
        runtime, constants = _parameters(self.kernel)
        launching.launch(
            self.kernel,
            self.grid,
            tuple([self.arguments[name] for name in runtime]),
            tuple([self.arguments[name] for name in constants]),
            num_warps=self.num_warps,
            num_stages=self.num_stages,
        )


@functools.cache
def _parameters(kernel: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of a kernel's run-time and its constexpr parameters, which stand at the end."""
    function = inspect.signature(kernel.fn).parameters.values()
    constants = [p.name for p in function if p.annotation in (tl.constexpr, "tl.constexpr", "constexpr")]
    runtime = [p.name for p in function if p.name not in constants]
    assert [*runtime, *constants] == [p.name for p in function]
    return tuple(runtime), tuple(constants)


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; elsewhere (interpreter, compile tests) a small constant."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def padded(size: int) -> int:
    """The block size that holds `size` elements: tl.arange needs a power of two and tl.dot at least 16."""
    return max(16, triton.next_power_of_2(size))


@functools.cache
def choose_splits(num_programs: int, max_blocks: int, processors: int) -> int:
    """Into how many parts each row's keys are cut: a power of two, so that few variants of `combine_kernel` exist.

    Enough to give every processor one program; twice that if each part still has eight blocks of keys, since then the
    partial results (written and read once more) stay small against the keys.
    """
    splits = min(max(processors // num_programs, 1), max(max_blocks, 1), MAX_SPLITS)
    splits = 1 << (splits.bit_length() - 1)
    if 2 * splits <= MAX_SPLITS and splits * num_programs <= processors and max_blocks >= 16 * splits:
        splits *= 2
    return splits


@functools.cache
def launch_options(
    capability: tuple[int, int], num_rows: int, page_size: int, key_width: int, value_width: int, element_size: int
) -> LaunchOptions:
    """Block sizes, warps and stages for `num_rows` rows over entries of `key_width` (with what lies beside the key).

    One entry takes key_width * element_size bytes of shared memory. Small row blocks, which wait for memory, take half
    of it, so that two programs on a processor hide each other's waits; large ones, waiting for the tensor cores, all.
    """
    shared = SHARED_BYTES.get(capability, SMALLEST_SHARED_BYTES)
    block_rows = min(padded(num_rows), 16 if element_size > 2 else 32 if shared == SMALLEST_SHARED_BYTES else 64)
    entry_bytes = key_width * element_size
    if block_rows < 64:
        shared //= 2
    # Matrix instructions that read both operands from shared memory (Hopper's and later) hold one buffer longer.
    extra = 1 if block_rows >= 64 and capability[0] >= 9 else 0
    for keys, num_stages in ((64, 3), (64, 2), (32, 3), (32, 2), (16, 2), (16, 1)):
        block_keys = min(keys, page_size)
        buffers = max(num_stages - 1, 1) + extra
        if (block_rows + buffers * block_keys) * entry_bytes + SCRATCH_BYTES <= shared:
            break
    num_warps = 8 if block_rows * value_width >= 1 << 14 else 4
    return LaunchOptions(block_rows, block_keys, num_warps, num_stages)


@triton.jit
def attended_blocks(
    length, start, num_queries, row_block, HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """The half-open range of key blocks that this program of (row block, row, split) reads; empty if first >= last."""
    end = length
    if CAUSAL:
        last_query = tl.minimum((row_block * BLOCK_ROWS + BLOCK_ROWS - 1) // HEADS, num_queries - 1)
        end = tl.maximum(length - num_queries + last_query + 1, 0)
    first = start // BLOCK_KEYS
    last = (end + BLOCK_KEYS - 1) // BLOCK_KEYS
    splits = tl.num_programs(2)
    blocks_per_split = (tl.maximum(last - first, 0) + splits - 1) // splits
    first += tl.program_id(2) * blocks_per_split
    return first, tl.minimum(first + blocks_per_split, last)


@triton.jit
def masked_scores(
    scores, keys, present, limits, mask, mask_offsets, mask_stride_t, mask_floor, max_length, live,
    MASK_IS_BOOL: tl.constexpr,
):  # fmt: skip
    """`scores` [rows, keys] (base 2) with -inf where a row may not look, and a floating mask added."""
    visible = present[None, :] & (keys[None, :] < limits[:, None])
    if mask is not None:
        inside = live[:, None] & (keys < max_length)[None, :]
        pointers = mask + mask_offsets[:, None] + keys[None, :].to(tl.int64) * mask_stride_t
        if MASK_IS_BOOL:
            visible = visible & (tl.load(pointers, mask=inside, other=0) != 0)
        else:
            bias = tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32)
            visible = visible & (bias > mask_floor)
            scores += bias * 1.4426950408889634
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def softmax_step(scores, row_max, row_sum):
    """One step of the running softmax: the block's weights, the factor for what was summed before, the new state.

    A row that has seen no key keeps a maximum of -inf; 0 stands in for it so that exp2 gives 0 and never NaN.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - finite_max)
    weights = tl.exp2(scores - finite_max[:, None])
    return weights, rescale, new_max, row_sum * rescale + tl.sum(weights, 1)


@triton.jit
def store_rows(
    total, row_max, row_sum, out, out_offsets, lse, part_rows, columns, live, WIDTH: tl.constexpr, SPLIT: tl.constexpr
):
    """Normalises and writes: into the output, or as this split's part of [row, split, WIDTH] with its log2-sum-exp."""
    seen = row_sum > 0.0
    # NaN scores make a NaN sum, which must reach the output: only an exact zero is replaced.
    total = total / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    inside = live[:, None] & (columns < WIDTH)[None, :]
    if SPLIT:
        parts = part_rows * tl.num_programs(2) + tl.program_id(2)
        tl.store(out + parts[:, None] * WIDTH + columns[None, :], total, mask=inside)
        tl.store(lse + parts, tl.where(seen, row_max + tl.log2(tl.where(seen, row_sum, 1.0)), row_sum * 0.0 + row_max),
                 mask=live)  # fmt: skip
    else:
        tl.store(out + out_offsets[:, None] + columns[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_splits", "num_queries"])
def combine_kernel(
    parts, lse, out, num_splits, num_queries, out_stride_b, out_stride_s, out_stride_h,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Merges parts [row, split, WIDTH] into one output row. Parts whose lse is -inf hold nothing and are not read."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    part = row * num_splits + split
    exponent = tl.load(lse + part, mask=split < num_splits, other=float("-inf"))
    largest = tl.max(exponent, 0)
    weight = tl.exp2(exponent - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total == 0.0, 1.0, total)
    inside = (exponent != float("-inf"))[:, None] & (column < WIDTH)[None, :]
    values = tl.load(parts + part[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
    head = row % HEADS
    query = row // HEADS % num_queries
    batch = row // HEADS // num_queries
    out += batch * out_stride_b + query * out_stride_s + head * out_stride_h
    tl.store(out + column, tl.sum(values * weight[:, None], 0).to(out.dtype.element_ty), mask=column < WIDTH)


def combine_launch(parts: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> Launch:
    """parts [B*S*H, splits, V] and lse [B*S*H, splits], fp32, into out [B, S, H, V] of any strides but unit last."""
    num_rows, num_splits, width = parts.shape
    block_width = min(padded(width), 128)
    arguments = {
        "parts": parts,
        "lse": lse,
        "out": out,
        "num_splits": num_splits,
        "num_queries": out.shape[1],
        "out_stride_b": out.stride(0),
        "out_stride_s": out.stride(1),
        "out_stride_h": out.stride(2),
        "HEADS": out.shape[2],
        "WIDTH": width,
        "BLOCK_SPLITS": triton.next_power_of_2(num_splits),
        "BLOCK_WIDTH": block_width,
    }
    grid = (num_rows, triton.cdiv(width, block_width))
    return Launch(combine_kernel, grid, arguments, num_warps=8 if num_splits > 32 else 4, num_stages=1)


@triton.jit(do_not_specialize=["num_splits"])
def combine_project_kernel(
    parts, lse, weight, out, num_splits, weight_head_stride, weight_row_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, BLOCK_VALUES: tl.constexpr,
):  # fmt: skip
    """`combine_kernel`, and the product of the merged row with its head's matrix weight [HEADS, VALUES, WIDTH].

    out [rows, VALUES]. For few rows: every program reads its block of the matrix once per row.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    column = tl.arange(0, BLOCK_WIDTH)
    value = tl.program_id(1) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    exponent = tl.load(lse + row * num_splits + split, mask=split < num_splits, other=float("-inf"))
    largest = tl.max(exponent, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(exponent - largest), 0)
    merged = tl.zeros([BLOCK_WIDTH], tl.float32)
    for i in range(num_splits):
        part = row * num_splits + i
        scale = tl.exp2(tl.load(lse + part) - largest)
        # a part whose lse is -inf holds nothing and is not read
        filled = column < tl.where(scale > 0.0, WIDTH, 0)
        merged += tl.load(parts + part * WIDTH + column, mask=filled, other=0.0) * scale
    merged = merged / tl.where(total == 0.0, 1.0, total)
    rounded = merged.to(out.dtype.element_ty).to(tl.float32)
    matrix = weight + (row % HEADS) * weight_head_stride + value[:, None] * weight_row_stride + column[None, :]
    inside = (value < VALUES)[:, None] & (column < WIDTH)[None, :]
    product = tl.sum(tl.load(matrix, mask=inside, other=0.0).to(tl.float32) * rounded[None, :], 1)
    tl.store(out + row * VALUES + value, product.to(out.dtype.element_ty), mask=value < VALUES)


def combine_project_launch(parts: torch.Tensor, lse: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Launch:
    """parts [B*S*H, splits, C] and lse [B*S*H, splits], fp32, times weight [H, V, C], into out [B, S, H, V]."""
    num_rows, num_splits, width = parts.shape
    heads, values, _ = weight.shape
    block_width = padded(width)
    block_values = min(padded(values), max(1, 16384 // block_width))
    arguments = {
        "parts": parts,
        "lse": lse,
        "weight": weight,
        "out": out,
        "num_splits": num_splits,
        "weight_head_stride": weight.stride(0),
        "weight_row_stride": weight.stride(1),
        "HEADS": heads,
        "WIDTH": width,
        "VALUES": values,
        "BLOCK_SPLITS": triton.next_power_of_2(num_splits),
        "BLOCK_WIDTH": block_width,
        "BLOCK_VALUES": block_values,
    }
    grid = (num_rows, triton.cdiv(values, block_values))
    return Launch(combine_project_kernel, grid, arguments, num_warps=8, num_stages=1)


def output_like(query: torch.Tensor, width: int) -> torch.Tensor:
    """An output [B, S, H, width] whose memory order is [H, B, S, width], what a per-head matrix product reads best."""
    batch, num_queries, heads, _ = query.shape
    return query.new_empty(heads, batch, num_queries, width).permute(1, 2, 0, 3)


def parts_like(query: torch.Tensor, num_splits: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for partial outputs and their log2-sum-exp, both fp32."""
    num_rows = query.shape[0] * query.shape[1] * query.shape[2]
    parts = query.new_empty(num_rows, num_splits, width, dtype=torch.float32)
    return parts, query.new_empty(num_rows, num_splits, dtype=torch.float32)


def mask_arguments(mask: torch.Tensor | None) -> dict[str, Any]:
    """Kernel arguments for a mask [B, 1, S, T] of any strides. A value of its dtype's minimum hides a key, as -inf."""
    if mask is None:
        return {
            "mask": None,
            "mask_floor": 0.0,
            "mask_stride_b": 0,
            "mask_stride_s": 0,
            "mask_stride_t": 0,
            "MASK_IS_BOOL": False,
        }
    is_bool = mask.dtype == torch.bool
    return {
        "mask": mask.view(torch.uint8) if is_bool else mask,
        "mask_floor": 0.0 if is_bool else torch.finfo(mask.dtype).min,
        # a dimension of size one stands for all rows or queries
        "mask_stride_b": mask.stride(0) if mask.shape[0] > 1 else 0,
        "mask_stride_s": mask.stride(2) if mask.shape[2] > 1 else 0,
        "mask_stride_t": mask.stride(3),
        "MASK_IS_BOOL": is_bool,
    }


def compile_case(name: str, launch: Launch, capability: int) -> tuple[str, Any, dict, dict, dict]:
    """A launch as the compiler's input (name, kernel, signature, constexprs, options), specialised as Triton does.

    Tensors may be on the meta device. `capability` says for which GPU the launch was laid out (90 means 9.0).
    """
    signature, constexprs, attrs = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constexprs[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TYPE_NAMES[value.dtype]
            attrs[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if specialised and value % 16 == 0:
                attrs[(index,)] = [["tt.divisibility", 16]]
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "attrs": attrs, "capability": capability}
    return name, launch.kernel, signature, constexprs, options


_TYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


def compile_cases() -> list[tuple[str, Any, dict, dict, dict]]:
    """The merge for V2-Lite (rank 512) and for Llama (head 128), few and many splits."""
    cases = []
    for width, num_splits in ((512, 4), (512, MAX_SPLITS), (128, 32)):
        query = torch.empty(2, 1, 16, width, dtype=torch.bfloat16, device="meta")
        launch = combine_launch(*parts_like(query, num_splits, width), output_like(query, width))
        cases += [
            compile_case(f"combine V{width} splits{num_splits}", launch, capability) for capability in (80, 90, 100)
        ]
    for heads in (16, 128):
        query = torch.empty(1, 1, heads, 512, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(heads, 128, 512, dtype=torch.bfloat16, device="meta")
        out = torch.empty(1, 1, heads, 128, dtype=torch.bfloat16, device="meta")
        launch = combine_project_launch(*parts_like(query, 32, 512), weight, out)
        cases += [compile_case(f"combine_project H{heads}", launch, capability) for capability in (80, 89, 90, 100)]
    return cases
