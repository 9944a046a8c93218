"""What the split-KV attention kernels share: dividing the keys, the running softmax, and merging the partial results.

Flash decoding (https://pytorch.org/blog/flash-decoding/): several programs each attend to a part of a row's keys and
write a normalised partial output and the log2 of its softmax denominator; `combine_kernel` then weights the parts.
All exponentials are base 2, so scores arrive multiplied by log2(e).

The grid has `num_splits` programs for a row whatever its length, so that a CUDA graph can hold it. How many of them
have keys, `key_parts` says, to the programs and to the merge alike: the others write nothing, and nobody reads their
part.
"""

import functools
import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import choices, launching

LOG2_E = 1.4426950408889634
MAX_SPLITS = 128

# Shared memory a block may use, by compute capability, in bytes. Unknown GPUs get the smallest.
SHARED_BYTES = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10, (10, 3): 227 << 10}
SMALLEST_SHARED_BYTES = 99 << 10
SCRATCH_BYTES = 8 << 10  # for the weights of a block and for layout changes


# Keys at once, stages, and whether a small row block may take a processor's whole shared memory; best first.
KEY_BLOCKS = (
    (64, 4, False),
    (64, 3, False),
    (64, 3, True),
    (64, 2, False),
    (32, 3, False),
    (32, 2, False),
    (16, 2, False),
    (16, 1, False),
)


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
        dependent = {"launch_pdl": True} if self.arguments.get("PDL") else {}
        launching.launch(
            self.kernel,
            self.grid,
            tuple([self.arguments[name] for name in runtime]),
            tuple([self.arguments[name] for name in constants]),
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            **dependent,
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
def least_blocks(num_programs: int, processors: int) -> int:
    """How many blocks of keys a part has at least, if a row's keys are cut in a number of parts made for long rows.

    One for few programs: the GPU is empty otherwise. Two if the rows alone nearly fill it: partial results are written
    and read once more.
    """
    return 1 if 8 * num_programs <= processors else 2


@choices.by_device
def launch_options(
    capability: tuple[int, int],
    num_rows: int,
    page_size: int,
    key_width: int,
    value_width: int,
    element_size: int,
    fp8_width: int = 0,
    crowded: bool = False,
) -> LaunchOptions:
    """Block sizes, warps and stages for `num_rows` rows over entries of `key_width` (with what lies beside the key).

    One entry takes key_width * element_size bytes of shared memory. Small row blocks, which wait for memory, take half
    of it, so that two programs on a processor hide each other's waits, or all of it where only that holds two blocks
    of 64 keys ahead (DeepSeek's latents on an H200: 20 to 40 % faster); large ones, waiting for the tensor cores, all.

    fp8_width: how many of an entry's numbers are stored in one byte. They wait as bytes, and are in shared memory once
    more, as numbers, while they are multiplied.

    crowded: whether there are more programs than processors. Of row blocks of 16 that decode, two programs of 32 keys
    each on a processor then hide more of each other's waits than one of 64 (H200, 32x8192: 119 us, not 130).
    """
    shared = SHARED_BYTES.get(capability, SMALLEST_SHARED_BYTES)
    block_rows = min(padded(num_rows), 16 if element_size > 2 else 32 if shared == SMALLEST_SHARED_BYTES else 64)
    if fp8_width and capability[0] < 9:
        block_rows = 16  # more would not fit in registers beside what is being decoded
    entry_bytes = key_width * element_size
    waiting_bytes = entry_bytes - fp8_width * (element_size - 1)
    small = block_rows < 64
    # Matrix instructions that read both operands from shared memory (Hopper's and later) hold one buffer longer.
    extra = 0 if small or capability[0] < 9 else 1
    for keys, num_stages, alone in KEY_BLOCKS:
        if not small and num_stages > 3:
            continue
        if block_rows <= 16 and fp8_width and crowded and (alone or keys > 32):
            continue
        block_keys = min(keys, page_size)
        buffers = max(num_stages - 1, 1) + extra
        allowed = shared // 2 if small and not alone else shared
        decoded = block_keys * fp8_width * element_size
        if block_rows * entry_bytes + buffers * block_keys * waiting_bytes + decoded + SCRATCH_BYTES <= allowed:
            break
    # a block of codes is decoded by all warps before it is multiplied
    num_warps = 8 if block_rows * value_width >= 1 << 14 or block_keys * fp8_width >= 1 << 15 else 4
    return LaunchOptions(block_rows, block_keys, num_warps, num_stages)


@triton.jit
def key_parts(
    length, start, num_queries, row_block, num_splits, least_blocks, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """How the keys of a row block are cut: the first block of keys, the end, the blocks of a part.

    Part i has blocks first + i * size up to first + (i + 1) * size or the end; a part that begins past it is empty.
    """
    end = length
    if CAUSAL:
        last_query = tl.minimum((row_block * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, num_queries - 1)
        end = tl.maximum(length - num_queries + last_query + 1, 0)
    first = start // BLOCK_KEYS
    last = (end + BLOCK_KEYS - 1) // BLOCK_KEYS
    return first, last, tl.maximum((tl.maximum(last - first, 0) + num_splits - 1) // num_splits, least_blocks)


@triton.jit
def storage_pointer(storage, address):
    """Where the pages are: at `storage`, or where the number at `address` says, in elements of `storage`."""
    if address is not None:
        # A torch allocation: its alignment, which the compiler cannot see, keeps loads 16 bytes wide.
        storage = tl.multiple_of(tl.load(address).to(tl.pointer_type(storage.dtype.element_ty)), 16)
    return storage


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


@triton.jit
def store_scores(scores, raw, part_rows, raw_stride, keys, present, live):
    """Leaves scores [rows, keys] (base 2, masked) in raw [part row, key], for `kernels/key_mass.py`."""
    places = raw + part_rows.to(tl.int64)[:, None] * raw_stride + keys[None, :]
    tl.store(places, scores, mask=live[:, None] & present[None, :])


@triton.jit
def active_parts(
    lengths, starts, batch, query, head, num_queries, num_splits, least_blocks, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """How many parts of an output row (batch, query, head), all of any shape, were written. 0: its row has no keys."""
    length = tl.load(lengths + batch)
    start = 0
    if starts is not None:
        start = tl.load(starts + batch)
    row_block = (query * GROUP + head % GROUP).to(tl.int32) // BLOCK_ROWS
    first, last, size = key_parts(
        length, start, num_queries, row_block, num_splits, least_blocks, GROUP, BLOCK_ROWS, BLOCK_KEYS, CAUSAL
    )
    return (tl.maximum(last - first, 0) + size - 1) // size


@triton.jit
def merged_row(
    parts, lse, row, num_splits, active, column, WIDTH: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Columns of the first `active` parts [row, split, WIDTH] of one row, merged, in fp32. Other parts are not read."""
    split = tl.arange(0, BLOCK_SPLITS)
    exponent = tl.load(lse + row * num_splits + split, mask=split < active, other=float("-inf"))
    largest = tl.max(exponent, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(exponent - largest), 0)
    # Many parts at once, summed at the end: one after the other, each would cost a trip to the L2.
    sums = tl.zeros([CHUNK, column.shape[0]], tl.float32)
    inside = (column < WIDTH)[None, :]
    for begin in range(0, active, CHUNK):
        part = begin + tl.arange(0, CHUNK)
        weight = tl.exp2(tl.load(lse + row * num_splits + part, mask=part < active, other=float("-inf")) - largest)
        places = (row * num_splits + part)[:, None] * WIDTH + column[None, :]
        sums += tl.load(parts + places, mask=(part < active)[:, None] & inside, other=0.0) * weight[:, None]
    return tl.sum(sums, 0) / tl.where(total == 0.0, 1.0, total)


@triton.jit(do_not_specialize=["num_splits", "num_queries", "least_blocks"])
def combine_kernel(
    parts, lse, lengths, starts, out, num_splits, num_queries, least_blocks, out_stride_b, out_stride_s, out_stride_h,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merges parts [row, split, WIDTH] into one output row; zeros where the row has no keys."""
    launching.launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    head = row % HEADS
    query = row // HEADS % num_queries
    batch = row // HEADS // num_queries
    launching.wait(PDL)
    active = active_parts(
        lengths, starts, batch, query, head, num_queries, num_splits, least_blocks, GROUP, BLOCK_ROWS, BLOCK_KEYS,
        CAUSAL,
    )  # fmt: skip
    merged = merged_row(parts, lse, row, num_splits, active, column, WIDTH, BLOCK_SPLITS, CHUNK)
    out += batch * out_stride_b + query * out_stride_s + head * out_stride_h
    tl.store(out + column, merged.to(out.dtype.element_ty), mask=column < WIDTH)


def merge_arguments(attention: dict[str, Any], group: int) -> dict[str, Any]:
    """What a merge needs to know of the attention kernel's arguments, to find the parts that were written.

    group: how many heads share a row block's keys.
    """
    same = ("lse", "lengths", "starts", "num_queries", "least_blocks", "BLOCK_ROWS", "BLOCK_KEYS", "CAUSAL", "PDL")
    return {"parts": attention["out"], "GROUP": group, **{name: attention[name] for name in same}}


def combine_launch(attention: dict[str, Any], group: int, out: torch.Tensor) -> Launch:
    """parts [B*S*H, splits, V] and lse [B*S*H, splits], fp32, into out [B, S, H, V] of any strides but unit last."""
    num_rows, num_splits, width = attention["out"].shape
    # Up to 4096 numbers are held at once: all columns of few parts, a part of the columns of many.
    block_width = min(padded(width), 512 if num_splits <= 4 else 128)
    arguments = {
        **merge_arguments(attention, group),
        "out": out,
        "num_splits": num_splits,
        "out_stride_b": out.stride(0),
        "out_stride_s": out.stride(1),
        "out_stride_h": out.stride(2),
        "HEADS": out.shape[2],
        "WIDTH": width,
        "BLOCK_SPLITS": triton.next_power_of_2(num_splits),
        "CHUNK": min(triton.next_power_of_2(num_splits), 32),
        "BLOCK_WIDTH": block_width,
    }
    grid = (num_rows, triton.cdiv(width, block_width))
    return Launch(combine_kernel, grid, arguments, num_warps=4, num_stages=1)


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
            if not parameter.do_not_specialize_on_alignment:
                attrs[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if specialised and value % 16 == 0:
                attrs[(index,)] = [["tt.divisibility", 16]]
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "attrs": attrs, "capability": capability}
    return name, launch.kernel, signature, constexprs, options


def aligned(names: list[str], chosen: Iterable[str]) -> dict[tuple[int], list]:
    """`attrs` of a case for `chosen` ones of a kernel's parameters `names`: multiples of 16, but not `address`."""
    return {(names.index(name),): [["tt.divisibility", 16]] for name in chosen if name not in ("address", "eps")}


_TYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
