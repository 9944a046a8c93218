"""Grouped-query attention: reference against definition, kernel (in Triton's interpreter) against reference."""

import pytest
import torch
from interpreter import interpret
from test_mla_attention import case_name, in_float64, move_pages, rows_of, visible_keys, weights_by_definition

from deepseek_accel.ops.gqa_attention import (
    CASES,
    GroupedCase,
    case_inputs,
    paged_gqa_attention,
    paged_gqa_attention_reference,
)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_reference_is_the_definition(case):
    inputs = case_inputs(case, torch.float64)
    keys, values = rows_of(case, inputs).split((case.kv_heads * case.head_dim, case.kv_heads * case.value_dim), -1)
    group = case.heads // case.kv_heads
    # [B, H, T, D]: each key head repeated for its queries.
    keys = keys.unflatten(-1, (case.kv_heads, case.head_dim)).transpose(1, 2).repeat_interleave(group, 1)
    values = values.unflatten(-1, (case.kv_heads, case.value_dim)).transpose(1, 2).repeat_interleave(group, 1)
    scores = inputs["query"].transpose(1, 2) @ keys.mT * inputs["scale"]
    expected = weights_by_definition(scores, visible_keys(case, inputs), inputs["mask"]) @ values
    actual = paged_gqa_attention_reference(**inputs)
    assert actual.shape == (len(case.lengths), case.queries, case.heads, case.value_dim)
    torch.testing.assert_close(actual, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_reference_without_knowing_the_lengths(case, monkeypatch):
    """What runs on devices that must not be waited for (spans unknown) equals what runs on the CPU."""
    inputs = case_inputs(case, torch.float64)
    expected = paged_gqa_attention_reference(**inputs)
    monkeypatch.setattr("deepseek_accel.ops.gqa_attention.key_spans", lambda lengths, starts: None)
    torch.testing.assert_close(paged_gqa_attention_reference(**inputs), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reference_dtypes(dtype):
    inputs = case_inputs(GroupedCase((33, 20), 16, queries=2), dtype)
    actual = paged_gqa_attention(**inputs)
    assert actual.dtype == dtype
    tolerance = max(torch.finfo(dtype).eps, 4e-7)
    expected = paged_gqa_attention_reference(**in_float64(inputs))
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def check_kernel(case, dtype_name):
    """In the interpreter: accurate, no NaN, and the same bits wherever the pages lie."""
    from deepseek_accel.kernels.gqa_attention import launch

    dtype = getattr(torch, dtype_name)
    inputs = case_inputs(case, dtype)
    actual = launch(**inputs, num_splits=case.splits or 1, least=1)
    assert actual.dtype == dtype, actual.dtype
    expected = paged_gqa_attention_reference(**in_float64(inputs))
    # fp16: the weights of a block and the output are rounded to fp16, each by half a unit in the last place.
    tolerance = 2e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())
    assert (actual[~visible_keys(case, inputs).any(-1)] == 0).all()
    move_pages(inputs)
    assert torch.equal(launch(**inputs, num_splits=case.splits or 1, least=1), actual), (
        "the result depends on where pages lie"
    )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_kernel(case, dtype):
    interpret(check_kernel, case, dtype)


def check_splits_agree():
    from deepseek_accel.kernels.gqa_attention import launch

    inputs = case_inputs(GroupedCase((257, 100, 3, 0), 16, queries=2), torch.float32)
    whole = launch(**inputs, num_splits=1)
    for num_splits, least in ((2, 1), (5, 1), (32, 1), (5, 2), (5, 100), (32, None), (None, None)):
        actual = launch(**inputs, num_splits=num_splits, least=least)
        torch.testing.assert_close(actual, whole, rtol=1e-5, atol=1e-6)
    inputs["query"] = torch.full_like(inputs["query"], float("nan"))
    for num_splits in (1, 4):
        assert launch(**inputs, num_splits=num_splits)[:2].isnan().all(), "NaN queries must not turn into numbers"


def test_splits_agree():
    """The number of parts changes rounding only, the automatic choice included; NaN inputs stay visible."""
    interpret(check_splits_agree)


def check_address():
    """Pages are found at the address; `storage` is then another tensor, of NaN."""
    from deepseek_accel.kernels.gqa_attention import launch

    inputs = case_inputs(GroupedCase((70, 40, 0), 16, starts=(35, 7, 0)), torch.float32)
    address = torch.tensor([inputs["storage"].data_ptr()])
    moved = dict(inputs, storage=torch.full_like(inputs["storage"][:1], float("nan")), address=address)
    for num_splits in (1, 4):
        assert torch.equal(launch(**moved, num_splits=num_splits), launch(**inputs, num_splits=num_splits))


def test_address_says_where_the_pages_are():
    interpret(check_address)
