"""Entries to their slots: torch against an assignment, and the kernel in the interpreter."""

import pytest
import torch
from interpreter import interpret

from deepseek_accel.ops.entry_copy import CASES, entry_copy


def inputs(case, dtype):
    count, width, page_size = case
    generator = torch.Generator().manual_seed(0)
    num_pages = 2 + count // page_size
    entries = torch.randn(count, width, generator=generator).mul(100).abs().to(dtype)
    slots = torch.randperm(num_pages * page_size, generator=generator)[:count]
    if count > 1:
        slots[-1] = -1
    unused = torch.nan if dtype.is_floating_point else 77
    return entries, torch.full((num_pages, page_size, width), unused, dtype=dtype), slots


def expected(entries, storage, slots):
    wanted = storage.clone().flatten(0, 1)
    for entry, slot in zip(entries, slots.tolist(), strict=True):
        if slot >= 0:
            wanted[slot] = entry
    return wanted.view(storage.shape)


def check(case, dtype, copy):
    entries, storage, slots = inputs(case, dtype)
    wanted = expected(entries, storage, slots)
    copy(entries, storage, slots)
    assert torch.equal(storage.nan_to_num(7.0), wanted.nan_to_num(7.0))


def check_kernel(case, dtype):
    from deepseek_accel.kernels.entry_copy import launch

    check(case, dtype, launch)
    # Pages are found at the address, not at the tensor, which then only tells the dtype.
    entries, storage, slots = inputs(case, dtype)
    wanted, pages = expected(entries, storage, slots), storage.clone()
    launch(entries, storage, slots, torch.tensor([pages.data_ptr()]))
    assert torch.equal(pages.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(storage.nan_to_num(7.0), inputs(case, dtype)[1].nan_to_num(7.0))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch(case):
    check(case, torch.float32, entry_copy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(case, dtype):
    interpret(check_kernel, case, dtype)
