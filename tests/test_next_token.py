"""The end of a step: torch against a loop, the kernel in Triton's interpreter against torch."""

import pytest
import torch
from interpreter import interpret

from deepseek_accel.ops.choice import triton_missing
from deepseek_accel.ops.next_token import CASES, Case, next_token_reference


def make(case, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(case.batch, case.vocabulary, generator=generator).to(dtype)
    tokens = torch.full((case.batch,), -7)
    unfinished = torch.tensor(case.unfinished, dtype=torch.bool)
    eos = torch.tensor([int(logits[0].argmax()), -1, -1])
    live = torch.tensor([max(1, case.batch - 1)], dtype=torch.int32)
    posts = torch.full((2, case.batch + 1), -5)
    return [logits, tokens, unfinished, live, eos, torch.tensor([77]), posts, torch.tensor([3], dtype=torch.int32)]


def by_loop(logits, tokens, unfinished, live, eos, pad, posts, count):
    for row in range(len(tokens)):
        token = max(range(logits.shape[1]), key=lambda i: (float(logits[row, i]), -i)) if unfinished[row] else int(pad)
        tokens[row] = token
        unfinished[row] = bool(unfinished[row]) and token not in eos.tolist()
    posts[1] = torch.tensor([*tokens.tolist(), any(unfinished[: int(live)].tolist())])
    count[0] = 4


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_the_rule(case):
    expected, ours = make(case), make(case)
    by_loop(*expected)
    next_token_reference(*ours)
    assert all(map(torch.equal, ours, expected))


def interpreted():
    from deepseek_accel.kernels import next_token as kernel

    results = {}
    for case in CASES:
        for dtype in (torch.float32, torch.float16):
            for chosen in (False, True):
                ours, expected = make(case, dtype), make(case, dtype)
                if chosen:
                    for inputs in (ours, expected):
                        inputs[1].copy_(inputs[0].argmax(-1))
                        inputs[0] = None
                kernel.launch(*ours)
                next_token_reference(*expected)
                results[f"{case}-{dtype}-{chosen}"] = all(map(torch.equal, ours[1:], expected[1:]))
    # ties take the lowest id, NaN wins, -inf everywhere gives 0, and blocks other than the first can win
    for name, change in {
        "tie": lambda logits: logits.fill_(1.0),
        "nan": lambda logits: logits[:, 5000].fill_(float("nan")),
        "inf": lambda logits: logits.fill_(float("-inf")),
        "last": lambda logits: logits[:, -1].fill_(100.0),
        "zero": lambda logits: logits.zero_()[:, 3].fill_(-0.0),
    }.items():
        ours = make(Case(2, 9001, (1, 1)))
        change(ours[0])
        expected = [tensor.clone() for tensor in ours]
        kernel.launch(*ours)
        next_token_reference(*expected)
        results[name] = all(map(torch.equal, ours[1:], expected[1:]))
    wide = torch.randn(3, 20)
    ours = make(Case(2, 20, (1, 1)))
    ours[0], ours[4][:] = wide.t()[:, :2].t(), -1
    kernel.launch(*ours)
    results["strided"] = torch.equal(ours[1], wide[:2].argmax(-1))
    return results


@pytest.mark.skipif(triton_missing() is not None, reason="Triton is not installed")
def test_kernel_in_the_interpreter():
    results = interpret(interpreted)
    assert len(results) == 4 * len(CASES) + 6
    assert not [name for name, right in results.items() if not right]
