"""What the two tiled kernels of four-bit weights have in common, `int4_mma.py` and `int4_tiles.py`.

Each serves three products (FORM): gate and up of experts, down of experts, and a dense weight; `int4_mma.py` also
SEVERAL dense weights of one input, and PAIRS: gate and up of experts, pair by pair, not sorted. Their arguments up to
the number of inputs and outputs are the same, and so is what happens around the experts' two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .experts_order import launch_combine, launch_sort
from .int4 import Packed, group_words

DENSE, GATE_UP, DOWN, SEVERAL, PAIRS = 0, 1, 2, 3, 4


@triton.jit
def weights_of_expert(
    words, groups, more_words, more_groups, up_words, up_groups, expert,
    FORM: tl.constexpr, E: tl.constexpr, SHARED: tl.constexpr, WORDS: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Where an expert's rows and groups begin, and those of its up weight in GATE_UP; and how far apart rows are, in
    words and in groups. WORDS, G: of a row. UNIT: 1 for pointers, 4 for addresses in bytes."""
    width, scales_width = WORDS, G
    if FORM == 1:
        first, scales = words + expert * (2 * N) * (WORDS * UNIT), groups + expert * (2 * N) * (G * UNIT)
        second = first + tl.full([], N, tl.int64) * (WORDS * UNIT)
        second_scales = scales + tl.full([], N, tl.int64) * (G * UNIT)
        if SHARED:  # noqa: SIM102, one is known when it compiles
            if expert >= E:
                first = more_words + (expert - E) * N * (WORDS * UNIT)
                scales = more_groups + (expert - E) * N * (G * UNIT)
                second = up_words + (expert - E) * N * (WORDS * UNIT)
                second_scales = up_groups + (expert - E) * N * (G * UNIT)
    else:
        first, scales = words + expert * N * (WORDS * UNIT), groups + expert * N * (G * UNIT)
        second, second_scales = more_words, more_groups
        if SHARED:  # noqa: SIM102
            if expert >= E:  # columns of one weight [N, SHARED * inputs]: inputs are whole groups then
                first = more_words + (expert - E) * (WORDS * UNIT)
                scales = more_groups + (expert - E) * (G * UNIT)
                width, scales_width = SHARED * WORDS, SHARED * G
    return first, scales, second, second_scales, width, scales_width


@dataclass
class Product:
    """One launch of either kernel. weights: `words`, `more_words` and `up_words` with their groups; experts: E, SLOTS,
    SHARED, in SEVERAL the rows of the three weights; order, plan: of `launch_sort`, for experts, in PAIRS order is the
    indices."""

    form: int
    x: torch.Tensor
    weights: tuple[Packed, Packed, Packed]
    out: torch.Tensor
    gated: bool
    num_rows: int
    num_tiles: int
    experts: tuple[int, int, int] = (1, 1, 0)
    order: torch.Tensor | None = None
    plan: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None

    @property
    def size(self) -> int:
        return self.x.shape[1]

    @property
    def count(self) -> int:
        return self.out.shape[1]

    def arguments(self) -> tuple[Any, ...]:
        """Those of the kernels, in their order. What a form does not use is any tensor."""
        unused = self.weights[0][0]
        packed = [tensor for words, groups in self.weights for tensor in (words, group_words(groups))]
        return (
            self.x,
            unused if self.order is None else self.order,
            unused if self.plan is None else self.plan,
            *packed,
            self.x if self.bias is None else self.bias,
            self.x if self.residual is None else self.residual,
            self.out,
            self.x.stride(0),
            self.num_rows,
            self.num_tiles,
        )

    def constants(self) -> tuple[Any, ...]:
        """FORM to N."""
        added = self.bias is not None, self.residual is not None
        return (self.form, self.gated, *added, *self.experts, self.size, self.count)


def dense_product(
    x: torch.Tensor,
    weight: Packed,
    other: Packed | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    rows: int,
) -> Product:
    """x [T, K] times weight [N, K] -> [T, N], or with `other` silu(x weight^T) * (x other^T), in tiles of `rows`."""
    num_tokens = len(x)
    out = torch.empty(num_tokens, weight[0].shape[0], dtype=x.dtype, device=x.device)
    second = weight if other is None else other
    residual = None if residual is None else residual.contiguous()
    gated, num_tiles = other is not None, -(-num_tokens // rows)
    weights = (weight, second, second)
    return Product(DENSE, x, weights, out, gated, num_tokens, num_tiles, bias=bias, residual=residual)


def launch_experts(
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Packed,
    down: Packed,
    out: torch.Tensor,
    shared: tuple[Packed, Packed, Packed] | None,
    residual: torch.Tensor | None,
    intermediate: int,
    rows: int,
    launch: Callable[[Product], None],
) -> None:
    """Into out [T, D]; the rest as in `ops.int4_experts.int4_mixture`, indices and weights contiguous. Pairs are sorted
    by expert, in tiles of `rows`; `launch` runs both products."""
    top_k = indices.shape[1]
    num_experts, size = down[0].shape[:2]
    gate, up, shared_down = (gate_up, gate_up, down) if shared is None else shared
    num_shared = 0 if shared is None else gate[0].shape[0] // intermediate
    order, plan = launch_sort(indices, num_experts, num_shared, rows)
    num_pairs, num_tiles = len(order), plan.shape[1]
    active = hidden.new_empty(num_pairs, intermediate)
    outputs = hidden.new_empty(num_pairs, size)
    tiled = (num_pairs, num_tiles, (num_experts, top_k + num_shared, num_shared), order, plan)
    launch(Product(GATE_UP, hidden, (gate_up, gate, up), active, True, *tiled))
    launch(Product(DOWN, active, (down, shared_down, shared_down), outputs, False, *tiled))
    launch_combine(outputs, indices, weights, residual, out, num_experts, num_shared)


def compile_signature(kernel: triton.JITFunction) -> tuple[dict[str, str], dict[str, list]]:
    """What either kernel is compiled for, in bf16: its signature and `attrs`."""
    packed = ("words", "groups", "more_words", "more_groups", "up_words", "up_groups")
    types = dict.fromkeys(("x", "bias", "more_bias", "up_bias", "residual", "out"), "*bf16") | dict.fromkeys(
        (*packed, "order", "tiles"), "*i32"
    )
    types |= dict.fromkeys(("x_stride", "num_rows", "num_tiles"), "i32")
    arguments = kernel.arg_names
    aligned = [argument for argument in arguments if types.get(argument, "")[:1] == "*" or argument == "x_stride"]
    signature = {argument: types.get(argument, "constexpr") for argument in arguments}
    return signature, {(arguments.index(argument),): [["tt.divisibility", 16]] for argument in aligned}
