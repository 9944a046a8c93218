"""The op that norms, rotates and stores new latents, against transformers' own functions and in the interpreter."""

import pytest
import torch
from interpreter import interpret
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb, apply_rotary_pos_emb_interleave

from deepseek_accel.ops.latent_write import CASES, Case, latent_write_reference, rotate
from deepseek_accel.testing import relative_error

PAGE = 16


def inputs(case: Case, dtype: torch.dtype, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    tokens = case.batch * case.queries

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    rows = 1 if case.shared_positions else case.batch
    angle = torch.rand(rows, case.queries, case.rope // 2, generator=generator) * 6
    pages = 2 + tokens // PAGE
    storage = torch.full((pages, PAGE, case.rank + case.rope), torch.nan, dtype=dtype)
    slots = torch.randperm(pages * PAGE, generator=generator)[:tokens]
    return (
        draw(case.batch, case.queries, case.heads, case.nope + case.rope),
        draw(case.batch, case.queries, case.rank + case.rope),
        draw(case.rank) * 0.1 + 1,
        1e-6,
        angle.cos(),
        angle.sin(),
        case.layout,
        draw(case.heads, case.nope, case.rank),
        storage,
        slots,
    )


def test_rotation_is_that_of_transformers():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 5, 8, generator=generator), torch.randn(2, 1, 5, 8, generator=generator)
    angle = torch.rand(2, 5, 4, generator=generator) * 6
    cos, sin = angle.cos(), angle.sin()
    both = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    for layout, (expected, expected_key) in {
        "pairs": apply_rotary_emb(q, k, torch.polar(torch.ones_like(angle), angle)),
        "pairs_to_halves": apply_rotary_pos_emb_interleave(q, k, *both),
        "halves": apply_rotary_pos_emb(q, k, *both),
    }.items():
        assert relative_error(rotate(q, cos[:, None], sin[:, None], layout), expected) < 1e-6
        assert relative_error(rotate(k, cos[:, None], sin[:, None], layout), expected_key) < 1e-6
    # the layouts differ, so that a swap would show
    assert relative_error(rotate(q, cos[:, None], sin[:, None], "halves"), expected_key.new_zeros(q.shape) + 1) > 0.1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_entries_land_in_their_slots_and_nowhere_else(case):
    arguments = inputs(case, torch.float32)
    _, compressed, weight, eps, cos, sin, layout, _, storage, slots = arguments
    latent_write_reference(*arguments)
    latent, key = compressed.double().split([case.rank, case.rope], -1)
    latent = weight.double() * latent * (latent.square().mean(-1, keepdim=True) + eps).rsqrt()
    key = rotate(key, cos.double(), sin.double(), layout)
    flat = storage.flatten(0, 1)
    assert relative_error(flat[slots], torch.cat((latent, key), -1).flatten(0, 1)) < 1e-6
    untouched = torch.ones(len(flat), dtype=torch.bool)
    untouched[slots] = False
    assert flat[untouched].isnan().all()


def kernel_error(case: Case, dtype: torch.dtype) -> float:
    from deepseek_accel.kernels.latent_write import launch

    ours, expected = inputs(case, dtype), inputs(case, dtype)
    ours[-1][0] = expected[-1][0] = 0
    q_latent, q_rope = launch(*ours)
    expected_latent, expected_rope = latent_write_reference(*expected)
    assert (q_latent is None) == (case.batch * case.queries > 128)
    assert torch.equal(ours[8].isnan(), expected[8].isnan())
    errors = [relative_error(q_rope, expected_rope)]
    errors.append(relative_error(ours[8].nan_to_num(), expected[8].nan_to_num()))
    if q_latent is not None:
        errors.append(relative_error(q_latent, expected_latent))
    return max(errors)


def check_address():
    """Pages are found at the address, not at the tensor, which then only tells the dtype."""
    from deepseek_accel.kernels.latent_write import launch

    for case in CASES:
        ours, expected = inputs(case, torch.float32), inputs(case, torch.float32)
        pages = ours[8].clone()
        address = torch.tensor([pages.data_ptr()])
        latent, rope = launch(*ours, address)
        assert ours[8].isnan().all()
        expected_latent, expected_rope = launch(*expected)
        assert torch.equal(rope, expected_rope) and (latent is None or torch.equal(latent, expected_latent))
        assert torch.equal(pages.nan_to_num(7.0), expected[8].nan_to_num(7.0))


def check_idle_rows():
    from deepseek_accel.kernels.latent_write import launch

    for write in (launch, latent_write_reference):
        arguments = inputs(CASES[1], torch.float32)
        arguments[-1][:] = -1
        write(*arguments)
        assert arguments[8].isnan().all()
        arguments[-1][2] = 5
        write(*arguments)
        flat = arguments[8].flatten(0, 1)
        assert flat[5].isfinite().all() and flat[:5].isnan().all() and flat[6:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(case, dtype):
    assert interpret(kernel_error, case, dtype) < (1e-6 if dtype == torch.float32 else 2e-3)


def test_idle_rows_write_nothing():
    interpret(check_idle_rows)


def test_address_says_where_the_pages_are():
    interpret(check_address)
