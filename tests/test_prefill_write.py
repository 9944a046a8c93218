"""Norm, rotation and page write of a prompt: against `latent_write`'s definition, and kernels in the interpreter."""

import pytest
import torch
from interpreter import interpret

from deepseek_accel.ops.latent_write import latent_write_reference
from deepseek_accel.ops.prefill_attention import Part, add_part_reference
from deepseek_accel.ops.prefill_write import CASES, Case, case_inputs, prefill_write, prefill_write_reference
from deepseek_accel.testing import relative_error


@pytest.mark.parametrize("case", CASES, ids=str)
def test_entries_and_queries_are_those_of_a_decoding_step(case):
    query, compressed, weight, eps, cos, sin, layout, storage, slots = case_inputs(case, torch.float32)
    if query.numel() == 0:
        pytest.skip("a decoding step has tokens")
    expected = torch.full_like(storage, torch.nan)
    w_uk = torch.zeros(case.heads, case.nope, case.rank)
    _, rotated = latent_write_reference(query, compressed, weight, eps, cos, sin, layout, w_uk, expected, slots)
    own = query[..., : case.nope].clone()
    prefill_write(query, compressed, weight, eps, cos, sin, layout, storage, slots)
    assert torch.equal(query[..., case.nope :], rotated) and torch.equal(query[..., : case.nope], own)
    assert torch.equal(storage.nan_to_num(7.0), expected.nan_to_num(7.0))
    used = slots >= 0
    assert torch.equal(storage.flatten(0, 1)[slots[used]], compressed.flatten(0, 1)[used])


def test_what_is_not_contiguous_is_refused():
    query, compressed, *rest = case_inputs(CASES[0], torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        prefill_write(query.transpose(1, 2), compressed, *rest)


def check_kernel(case: Case, dtype: torch.dtype, tolerance: float):
    from deepseek_accel.kernels.prefill_write import launch

    ours, expected = case_inputs(case, dtype), case_inputs(case, dtype)
    launch(*ours)
    prefill_write_reference(*expected)
    for index in (0, 1, 7):
        actual, wanted = ours[index], expected[index]
        assert torch.equal(actual.isnan(), wanted.isnan()), "an entry was left out, or something else was written"
        if actual.numel():
            assert relative_error(actual.nan_to_num(), wanted.nan_to_num()) < tolerance


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float16, 1e-3)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(case, dtype, tolerance):
    interpret(check_kernel, case, dtype, tolerance)


# (B, S, H, V, strides of the second part as cuDNN may leave them)
MERGES = [
    (1, 5, 2, 16, False),  # less than a block of queries
    (2, 300, 3, 24, True),  # several blocks, a width that is no power of two
]


def parts_of(batch, queries, heads, width, transposed):
    generator = torch.Generator().manual_seed(0)
    parts = []
    for turned in (False, transposed):
        shape = (batch, heads, queries, width) if turned else (batch, queries, heads, width)
        out = torch.randn(shape, generator=generator)
        lse = torch.randn(batch, heads, queries, generator=generator) * 20
        parts.append(Part(out.transpose(1, 2) if turned else out, lse))
    parts[1].lse[:, :, ::3] = -torch.inf  # queries that see no key of the second part, of the first, of both
    parts[0].lse[:, :, 1::3] = -torch.inf
    parts[0].lse[:, 0, 0] = -torch.inf
    for part in parts:
        part.out.transpose(1, 2)[part.lse == -torch.inf] = 0
    return parts


def check_merge(case):
    from deepseek_accel.kernels.prefill_parts import launch_merge

    (first, first_lse), (second, second_lse) = parts_of(*case)
    before = first.clone(), first_lse.clone()
    out, lse = launch_merge(first, first_lse, second, second_lse, torch.float32)
    wanted, wanted_lse = add_part_reference(first, first_lse, second, second_lse, torch.float32)
    assert relative_error(out, wanted) < 1e-6
    empty = wanted_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty) and empty.any() and (out.transpose(1, 2)[empty] == 0).all()
    assert relative_error(lse.masked_fill(empty, 0), wanted_lse.masked_fill(empty, 0)) < 1e-6
    assert torch.equal(first, before[0]) and torch.equal(first_lse, before[1])


@pytest.mark.parametrize("case", MERGES, ids=str)
def test_merge_kernel(case):
    interpret(check_merge, case)


def check_whole_keys(heads, nope, rope):
    from deepseek_accel.kernels.prefill_parts import launch_whole_keys

    both, entries = torch.randn(2, 5, heads, nope + 9), torch.randn(2, 5, rope + 7)
    key, shared = both[..., :nope], entries[..., 7:]
    expected = torch.cat((key, shared.unsqueeze(2).expand(*key.shape[:3], -1)), -1)
    assert torch.equal(launch_whole_keys(key, shared), expected)


@pytest.mark.parametrize("sizes", [(4, 16, 8), (19, 24, 12)], ids=str)
def test_whole_keys_kernel(sizes):
    """Also more heads than a block, and widths that are no power of two."""
    interpret(check_whole_keys, *sizes)
