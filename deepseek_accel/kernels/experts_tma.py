"""Experts for thousands of tokens on Hopper: sorted as in `experts_tiles`, weights brought by the tensor memory
accelerator (TMA), wide tiles, and the shared experts as plain matrix products.

With hundreds of rows per expert tensor cores are what counts. TMA descriptors (CUDA C++ Programming Guide, "Tensor
Memory Access") spare the threads the addresses of the weights, so that both operands of a 128 x 256 tile fit four
stages deep. Shared experts see every token: cuBLAS does that better than a tile of ours, and their sum with the
residual is its own last step.

H200, V2-Lite, routed experts of 8,192 tokens, us (TFLOP/s): gate-up 968 (586), down 535 (530); `experts_tiles` 1,964
for both with sorting and the weighted sum. torch's grouped_mm: 931 and 500, but the rows gathered before (112) and SiLU
apart after it. From about 256 rows per expert on the sum is less than with `experts_tiles`; at 192 it is the same.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from . import launching
from .experts_order import launch_combine, launch_sort, tile_of_program
from .experts_pairs import silu
from .launching import launch_dependents, wait
from .projection import launch_silu_mul

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton without descriptors made on the host: `takes` refuses
    TensorDescriptor = None

LEAST_ROWS = 256
"""Mean rows per expert from which on this is the faster way."""
ROWS = 128
GATE_UP_COLUMNS, DOWN_COLUMNS = 128, 256
INNER, WARPS, STAGES, GROUP = 64, 8, 4, 32


@triton.jit(do_not_specialize=["num_tiles"])
def tma_gate_up_kernel(
    hidden,  # [T, D]
    order,  # [pairs]
    tiles,  # [3, num_tiles]
    weights,  # descriptor of [E * 2I, D], blocks [BLOCK_N, BLOCK_K]
    active,  # [pairs, I], contiguous, sorted
    hidden_stride,
    num_tiles,
    K: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """silu(gate) * up of the rows of one tile; gate and up are two blocks of the same expert. BLOCK_K divides D."""
    launch_dependents(PDL)
    wait(PDL)
    tile, column = tile_of_program(num_tiles, (I + BLOCK_N - 1) // BLOCK_N, GROUP)
    expert = tl.load(tiles + tile)
    if expert < 0:
        return
    row = tl.load(tiles + num_tiles + tile) + tl.arange(0, BLOCK_M)
    used = row < tl.load(tiles + 2 * num_tiles + tile)
    # Rows past the last read token 0: what they compute is not stored, and a load without a mask is faster.
    token = (tl.load(order + row, mask=used, other=0) // K).to(tl.int64)
    x = hidden + token[:, None] * hidden_stride + tl.arange(0, BLOCK_K)[None, :]
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first = expert * (2 * I) + column * BLOCK_N
    for start in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        value = tl.load(x + start)
        gate = tl.dot(value, weights.load([first, start]).T, gate)
        up = tl.dot(value, weights.load([first + I, start]).T, up)
    outer = column * BLOCK_N + tl.arange(0, BLOCK_N)
    pointers = active + row.to(tl.int64)[:, None] * I + outer[None, :]
    # columns past the last are another matrix's
    tl.store(pointers, (silu(gate) * up).to(active.dtype.element_ty), mask=used[:, None] & (outer < I)[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def tma_down_kernel(
    order,  # [pairs]
    tiles,  # [3, num_tiles]
    active,  # descriptor of [pairs, I], sorted, blocks [BLOCK_M, BLOCK_K]
    weights,  # descriptor of [E * D, I], blocks [BLOCK_N, BLOCK_K]
    outputs,  # [pairs, D], contiguous, in the original order
    num_tiles,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Outputs of the rows of one tile. BLOCK_K divides I."""
    launch_dependents(PDL)
    wait(PDL)
    tile, column = tile_of_program(num_tiles, (D + BLOCK_N - 1) // BLOCK_N, GROUP)
    expert = tl.load(tiles + tile)
    if expert < 0:
        return
    first = tl.load(tiles + num_tiles + tile)
    row = first + tl.arange(0, BLOCK_M)
    used = row < tl.load(tiles + 2 * num_tiles + tile)
    pair = tl.load(order + row, mask=used, other=0).to(tl.int64)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, I, BLOCK_K, num_stages=STAGES):
        weight = weights.load([expert * D + column * BLOCK_N, start])
        total = tl.dot(active.load([first, start]), weight.T, total)
    outer = column * BLOCK_N + tl.arange(0, BLOCK_N)
    pointers = outputs + pair[:, None] * D + outer[None, :]
    tl.store(pointers, total.to(outputs.dtype.element_ty), mask=used[:, None] & (outer < D)[None, :])


def takes(hidden: torch.Tensor, top_k: int, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether this way is the faster one, and these tensors are such that TMA can read them."""
    num_experts, size, intermediate = down.shape
    return (
        TensorDescriptor is not None
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and hidden.shape[0] * top_k >= LEAST_ROWS * num_experts
        and size % INNER == 0
        and intermediate % INNER == 0
        and hidden.is_cuda
        and torch.cuda.get_device_capability(hidden.device) == (9, 0)
        and all(weight.is_contiguous() and weight.data_ptr() % 16 == 0 for weight in (gate_up, down))
    )


def launch(
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    residual: torch.Tensor | None,
) -> None:
    """As `experts_tiles.launch`. The sum of shared experts and residual is rounded before routed ones are added."""
    top_k = indices.shape[1]
    num_experts, size, intermediate = down.shape
    pdl = launching.uses_pdl(hidden.device)
    if shared is not None:
        gate, up, shared_down = shared
        product = launch_silu_mul(F.linear(hidden, gate), F.linear(hidden, up))
        residual = F.linear(product, shared_down) if residual is None else residual.addmm(product, shared_down.t())
        del product
    order, plan = launch_sort(indices, num_experts, 0, ROWS)
    num_pairs, num_tiles = len(order), plan.shape[1]
    active = hidden.new_empty(num_pairs, intermediate)
    outputs = hidden.new_empty(num_pairs, size)
    options = {"num_warps": WARPS, **({"launch_pdl": True} if pdl else {})}
    gate_up_rows = TensorDescriptor.from_tensor(gate_up.view(-1, size), [GATE_UP_COLUMNS, INNER])
    launching.launch(
        tma_gate_up_kernel,
        (num_tiles * -(-intermediate // GATE_UP_COLUMNS),),
        (hidden, order, plan, gate_up_rows, active, hidden.stride(0), num_tiles),
        (top_k, size, intermediate, ROWS, GATE_UP_COLUMNS, INNER, STAGES, GROUP, pdl),
        **options,
    )
    active_rows = TensorDescriptor.from_tensor(active, [ROWS, INNER])
    down_rows = TensorDescriptor.from_tensor(down.view(-1, intermediate), [DOWN_COLUMNS, INNER])
    launching.launch(
        tma_down_kernel,
        (num_tiles * -(-size // DOWN_COLUMNS),),
        (order, plan, active_rows, down_rows, outputs, num_tiles),
        (size, intermediate, ROWS, DOWN_COLUMNS, INNER, STAGES, GROUP, pdl),
        **options,
    )
    launch_combine(outputs, indices, weights, residual, out, num_experts, 0)


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) for V2-Lite and V3 in bf16."""
    cases = []
    sizes = {"BLOCK_M": ROWS, "BLOCK_K": INNER, "STAGES": STAGES, "GROUP": GROUP, "PDL": True}
    for model, top_k, size, intermediate in (("v2-lite", 6, 2048, 1408), ("v3", 8, 7168, 2048)):
        constants = sizes | {"K": top_k, "D": size, "I": intermediate}
        for kernel, columns in ((tma_gate_up_kernel, GATE_UP_COLUMNS), (tma_down_kernel, DOWN_COLUMNS)):
            types = {
                **dict.fromkeys(("hidden", "outputs", "active"), "*bf16"),
                **{"order": "*i32", "tiles": "*i32", "num_tiles": "i32", "hidden_stride": "i32"},
                "weights": f"tensordesc<bf16[{columns}, {INNER}]>",
            }
            if kernel is tma_down_kernel:
                types["active"] = f"tensordesc<bf16[{ROWS}, {INNER}]>"
            names = kernel.arg_names
            aligned = [name for name in names if types.get(name, "")[:1] == "*" or name == "hidden_stride"]
            attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
            cases.append(
                (
                    f"{kernel.fn.__name__.removesuffix('_kernel')}-{model}",
                    kernel,
                    {name: types.get(name, "constexpr") for name in names},
                    {name: value for name, value in (constants | {"BLOCK_N": columns}).items() if name in names},
                    {"num_warps": WARPS, "num_stages": 3, "capability": 90, "attrs": attrs},
                )
            )
    return cases
