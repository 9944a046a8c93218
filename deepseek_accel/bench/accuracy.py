"""Whether an optimized model may be timed. It is compared with stock on the prompts that will be timed.

Stock and optimized each generate a few tokens greedily, through `model.generate`, and hand over the logits of every
step. Steps are compared row by row up to and including the first token that differs: until then both saw the same
tokens. The error of a step is |ours - stock| / |stock|, vectors over the vocabulary.

fp32: every token must be equal.

bf16, fp16: two right programs round differently, so tokens may differ where the two best logits are close. The noise of
stock is measured: the same tokens once more, in one pass instead of step by step, with embeddings moved by up to half a
unit in the last place. Then
- the median error of the steps may be at most NOISE_FACTOR times the median noise;
- no step may be off by more than GROSS_ERROR, or twice the worst noise if that is more: one wrong row among many good
  ones does not move a median (unrelated logits are off by 1.4);
- every token must be the one with the largest of its own logits, which convicts a wrong choice from right logits.
NaN never passes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

CHECKED_TOKENS = 9
NOISE_ROWS = 8
NOISE_FACTOR = 2.0
GROSS_ERROR = 0.3
CLOSE_CHOICE = 1.0
"""Standard deviations. Rounding chooses among logits much closer than that; an unrelated token lies some 4 below."""


@dataclass(frozen=True)
class Sample:
    """Greedy tokens [B, N] and the logits [B, N, V] they were chosen from, fp32, on the CPU."""

    tokens: torch.Tensor
    logits: torch.Tensor
    cache_bytes: int


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison."""

    ok: bool
    why: str
    """One sentence, with the numbers that decided."""
    error: float
    """Median relative error of the compared logits."""
    noise: float | None
    """The same of stock against itself, or None where tokens had to be equal."""
    tokens_equal: int
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def step_errors(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[B, N]: the relative error of each step's logits [B, N, V]. NaN counts as infinitely wrong."""
    errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    return errors.nan_to_num(nan=float("inf"), posinf=float("inf"))


def furthest_choice(tokens: torch.Tensor, logits: torch.Tensor) -> float:
    """How far the worst of greedy tokens [N] lies below the best logit of its step, in standard deviations of that
    step's logits [N, V]. NaN counts as infinitely far."""
    chosen = logits.gather(-1, tokens[:, None])[:, 0]
    gaps = (logits.amax(-1) - chosen) / logits.std(-1).clamp_min(1e-30)
    return gaps.nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()


def comparable(ours: torch.Tensor, stock: torch.Tensor) -> torch.Tensor:
    """[B, N] bool: steps before which both had chosen the same tokens."""
    equal = (ours == stock).long().cumprod(1)
    return torch.cat((torch.ones_like(equal[:, :1]), equal[:, :-1]), 1).bool()


@torch.no_grad()
def stock_noise(model: Any, prompt: torch.Tensor, stock: Sample, seed: int = 0) -> torch.Tensor:
    """[rows, N]: how far stock's logits move when the same tokens are rounded differently. `model` is not optimized."""
    rows, steps = min(NOISE_ROWS, len(prompt)), stock.tokens.shape[1]
    fed = stock.tokens[:rows, :-1].to(prompt.device)
    generator = torch.Generator(prompt.device).manual_seed(seed)

    def move(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        shift = torch.rand(output.shape, generator=generator, device=output.device) - 0.5
        return (output.float() * (1 + shift * torch.finfo(output.dtype).eps)).to(output.dtype)

    hook = model.get_input_embeddings().register_forward_hook(move)
    try:
        output = model(input_ids=torch.cat((prompt[:rows], fed), 1), logits_to_keep=steps, use_cache=False)
    finally:
        hook.remove()
    return step_errors(output.logits.float().cpu(), stock.logits[:rows])


def compare(stock: Sample, ours: Sample, noise: torch.Tensor | None) -> Verdict:
    """The rule above. noise: of `stock_noise`, or None if every token must be equal (fp32)."""
    steps = comparable(ours.tokens, stock.tokens)
    errors = step_errors(ours.logits, stock.logits)[steps]
    equal = int((ours.tokens == stock.tokens).sum())
    error, worst = errors.median().item(), errors.max().item()
    chosen = ours.logits.gather(-1, ours.tokens[..., None])[..., 0]
    greedy = bool((chosen == ours.logits.amax(-1)).all())

    def verdict(ok: bool, why: str) -> Verdict:
        typical = None if noise is None else noise.median().item()
        return Verdict(ok, why, error, typical, equal, ours.tokens.numel())

    if not greedy:
        return verdict(False, "a token is not the one with the largest logit")
    if noise is None:
        if equal == ours.tokens.numel() and worst < GROSS_ERROR:
            return verdict(True, f"{equal} tokens equal")
        row, step = (ours.tokens != stock.tokens).nonzero()[0].tolist() if equal < ours.tokens.numel() else (0, 0)
        return verdict(
            False,
            f"{ours.tokens.numel() - equal} of {ours.tokens.numel()} tokens differ, first in row {row} at step {step}; "
            f"logits are off by {worst:.2g}",
        )
    allowed, gross = NOISE_FACTOR * noise.median().item(), max(GROSS_ERROR, 2 * noise.max().item())
    if not error <= allowed:
        return verdict(False, f"logits are off by {error:.2g}, twice stock's own rounding noise is {allowed:.2g}")
    if not worst <= gross:
        return verdict(False, f"logits of one step are off by {worst:.2g}, at most {gross:.2g} is rounding")
    return verdict(True, f"logits within {error:.2g}, stock's own noise is {allowed / NOISE_FACTOR:.2g}")
