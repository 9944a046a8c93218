"""Rotating and storing new keys and values: against transformers' own functions, and the kernel in the interpreter."""

import pytest
import torch
from interpreter import interpret
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from deepseek_accel.ops.entry_write import CASES, Case, case_inputs, entry_write, entry_write_reference
from deepseek_accel.testing import relative_error


@pytest.mark.parametrize("case", CASES, ids=str)
def test_entries_are_those_of_transformers(case):
    query, key, value, cos, sin, storage, slots = case_inputs(case, torch.float64)
    whole = (cos, sin) if case.whole_angles else (torch.cat((x, x), -1) for x in (cos, sin))
    rotated, keys = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *(x.double() for x in whole))
    actual = entry_write(query, key, value, cos, sin, storage, slots)
    assert relative_error(actual, rotated.transpose(1, 2)) < 1e-12
    entries = torch.cat((keys.transpose(1, 2).flatten(2), value.flatten(2)), -1).flatten(0, 1)
    flat = storage.flatten(0, 1)
    used = slots >= 0
    assert used.any() and relative_error(flat[slots[used]], entries[used]) < 1e-12
    untouched = torch.ones(len(flat), dtype=torch.bool)
    untouched[slots[used]] = False
    assert flat[untouched].isnan().all()


def check_kernel(case: Case, dtype: torch.dtype, tolerance: float):
    from deepseek_accel.kernels.entry_write import launch

    ours, expected = case_inputs(case, dtype), case_inputs(case, dtype)
    rotated, wanted = launch(*ours), entry_write_reference(*expected)
    assert relative_error(rotated, wanted) < tolerance
    assert torch.equal(ours[5].isnan(), expected[5].isnan()), "an entry was left out, or something else was written"
    assert relative_error(ours[5].nan_to_num(), expected[5].nan_to_num()) < tolerance
    # Pages are found at the address, not at the tensor, which then only tells the dtype.
    moved = case_inputs(case, dtype)
    pages = moved[5].clone()
    assert torch.equal(launch(*moved, torch.tensor([pages.data_ptr()])), rotated)
    assert moved[5].isnan().all()
    assert torch.equal(pages.nan_to_num(7.0), ours[5].nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(case, dtype):
    interpret(check_kernel, case, dtype, 1e-6 if dtype == torch.float32 else 1e-3)
