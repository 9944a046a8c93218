"""Latent attention: reference against definition, kernel (in Triton's interpreter) against reference."""

import pytest
import torch
from interpreter import interpret

from deepseek_accel.ops.mla_attention import (
    CASES,
    LatentCase,
    absorb_query,
    case_inputs,
    dense_latent_attention,
    graph_splits,
    latent_attention,
    latent_attention_reference,
    project_values,
)


def case_name(case):
    changed = {name: value for name, value in case._asdict().items() if value != case._field_defaults.get(name)}
    return "-".join(f"{name}{value}" for name, value in changed.items()).replace(" ", "")


def visible_keys(case, inputs):
    """[B, S, T], straight from the contract."""
    shape = (len(case.lengths), case.queries, max(case.lengths))
    visible = torch.zeros(shape, dtype=torch.bool)
    for b, length in enumerate(case.lengths):
        for s in range(case.queries):
            end = length - case.queries + s + 1 if case.causal else length
            start = case.starts[b] if case.starts else 0
            visible[b, s, start : max(end, start)] = True
    if inputs["mask"] is not None:
        mask = inputs["mask"][:, 0]
        visible &= mask if case.mask == "bool" else mask > torch.finfo(mask.dtype).min
    return visible


def rows_of(case, inputs):
    """The entries [B, T, C + R] back out of the pages, token by token."""
    entries = torch.zeros(
        len(case.lengths), max(case.lengths), inputs["storage"].shape[2], dtype=inputs["storage"].dtype
    )
    for b, length in enumerate(case.lengths):
        for t in range(case.starts[b] if case.starts else 0, length):
            page = inputs["block_table"][b, t // case.page_size]
            entries[b, t] = inputs["storage"][page, t % case.page_size]
    return entries


def in_float64(inputs):
    wide = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
    mask = inputs["mask"]
    if mask is not None and mask.dtype != torch.bool:  # the value that hides is the minimum of the mask's own dtype
        wide["mask"] = wide["mask"].masked_fill(mask <= torch.finfo(mask.dtype).min, float("-inf"))
    return wide


def move_pages(inputs):
    """Puts the pages elsewhere in the storage: the same attention, in another physical order."""
    num_pages = inputs["storage"].shape[0]
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5))
    inputs["storage"] = inputs["storage"][order]
    table = inputs["block_table"]
    inputs["block_table"] = torch.where(table < num_pages, order.argsort()[table.clamp(max=num_pages - 1)], table).int()


def weights_by_definition(scores, visible, mask):
    """Softmax over the visible keys only of scores [B, H, S, T], one query after the other."""
    weights = torch.zeros_like(scores)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    for b, s in torch.cartesian_prod(torch.arange(scores.shape[0]), torch.arange(scores.shape[2])).tolist():
        keys = visible[b, s].nonzero()[:, 0]
        if len(keys):
            exponents = scores[b, :, s, keys] - scores[b, :, s, keys].amax(-1, keepdim=True)
            weights[b, :, s, keys] = exponents.exp() / exponents.exp().sum(-1, keepdim=True)
    return weights


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_absorbed_attention_is_expanded_attention(case):
    """M03: with kv_b split per head into [nope | value] rows, absorbing equals expanding; fp64, to 1e-12."""
    inputs = case_inputs(case, torch.float64)
    generator = torch.Generator().manual_seed(1)
    kv_b = torch.randn(case.heads * (case.nope + case.value), case.rank, generator=generator, dtype=torch.float64)
    w_uk, w_uv = kv_b.view(case.heads, case.nope + case.value, case.rank).split((case.nope, case.value), 1)
    q_nope = torch.randn(
        len(case.lengths), case.heads, case.queries, case.nope, generator=generator, dtype=torch.float64
    )
    inputs["q_latent"] = absorb_query(q_nope, w_uk)
    inputs["scale"] = (case.nope * case.rank) ** -0.5
    actual = project_values(latent_attention_reference(**inputs), w_uv)

    latent, k_rope = rows_of(case, inputs).split((case.rank, case.rope), -1)
    k_nope, values = (
        (latent @ kv_b.T).unflatten(-1, (case.heads, -1)).transpose(1, 2).split((case.nope, case.value), -1)
    )
    q_rope = inputs["q_rope"].transpose(1, 2)
    scores = (q_nope @ k_nope.mT + q_rope @ k_rope[:, None].mT) * inputs["scale"]
    expected = weights_by_definition(scores, visible_keys(case, inputs), inputs["mask"]) @ values
    assert actual.shape == (len(case.lengths), case.queries, case.heads, case.value)
    torch.testing.assert_close(actual, expected.transpose(1, 2), rtol=1e-12, atol=1e-12 * expected.abs().max().item())


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_reference_without_knowing_the_lengths(case, monkeypatch):
    """What runs on devices that must not be waited for (spans unknown) equals what runs on the CPU."""
    inputs = case_inputs(case, torch.float64)
    expected = latent_attention_reference(**inputs)
    monkeypatch.setattr("deepseek_accel.ops.mla_attention.key_spans", lambda lengths, starts: None)
    torch.testing.assert_close(latent_attention_reference(**inputs), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reference_dtypes(dtype):
    case = LatentCase((33, 20), 16, queries=2)
    inputs = case_inputs(case, dtype)
    expected = latent_attention_reference(**in_float64(inputs))
    actual = latent_attention(**inputs)
    assert actual.dtype == dtype
    tolerance = max(torch.finfo(dtype).eps, 4e-7)
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("causal", [True, False])
def test_dense_equals_paged(causal, mask):
    case = LatentCase((33, 33), 16, queries=4, mask=mask, causal=causal)
    inputs = case_inputs(case, torch.float64)
    latent, k_rope = rows_of(case, inputs)[:, None].split((case.rank, case.rope), -1)
    actual = dense_latent_attention(
        inputs["q_latent"], inputs["q_rope"], latent, k_rope, inputs["scale"], mask=inputs["mask"], causal=causal
    )
    torch.testing.assert_close(actual, latent_attention_reference(**inputs), rtol=1e-12, atol=1e-12)


def test_dense_indices_choose_keys():
    """Indices equal a mask of the same keys; -1 is no key (and not the last one); a query without any yields 0."""
    case = LatentCase((20, 20), 16, queries=3)
    inputs = case_inputs(case, torch.float64)
    latent, k_rope = rows_of(case, inputs)[:, None].split((case.rank, case.rope), -1)
    indices = torch.tensor([[[0, 5, -1], [19, 3, 4], [-1, -1, -1]], [[7, -1, -1], [19, 18, 17], [2, 2, 9]]])
    chosen = torch.zeros(2, 3, 20, dtype=torch.bool)
    for b, s, k in torch.cartesian_prod(*map(torch.arange, indices.shape)).tolist():
        if indices[b, s, k] >= 0:
            chosen[b, s, indices[b, s, k]] = True
    arguments = (inputs["q_latent"], inputs["q_rope"], latent, k_rope, inputs["scale"])
    actual = dense_latent_attention(*arguments, causal=True, indices=indices)
    torch.testing.assert_close(actual, dense_latent_attention(*arguments, mask=chosen[:, None], causal=True))
    assert (actual[0, 2] == 0).all()


def test_gradients_flow_through_dense_attention():
    tensors = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in
               [(1, 2, 2, 6), (1, 2, 2, 4), (1, 1, 5, 6), (1, 1, 5, 4)]]  # fmt: skip
    assert torch.autograd.gradcheck(lambda *inputs: dense_latent_attention(*inputs, 0.5, causal=True), tensors)


def test_absorbing_and_projecting_copy_no_weight():
    """Both see [H, B, S, ...] memory as it is: a matrix product per head, no copy of weights or of the output."""
    w_uk, w_uv = torch.randn(4, 40, 64).split((24, 16), 1)
    q_latent = absorb_query(torch.randn(2, 3, 4, 24).transpose(1, 2), w_uk)
    assert q_latent.shape == (2, 3, 4, 64) and q_latent.permute(2, 0, 1, 3).is_contiguous()
    assert project_values(q_latent, w_uv).permute(2, 0, 1, 3).is_contiguous()


def check_kernel(case, dtype_name):
    """In the interpreter: accurate, no NaN, and the same bits wherever the pages lie."""
    from deepseek_accel.kernels.mla_attention import launch

    dtype = getattr(torch, dtype_name)
    inputs = case_inputs(case, dtype)
    actual = launch(**inputs, num_splits=case.splits or 1, least=1)
    assert actual.dtype == dtype, actual.dtype
    assert actual.permute(2, 0, 1, 3).is_contiguous(), actual.stride()
    expected = latent_attention_reference(**in_float64(inputs))
    # fp16: the weights of a block and the output are rounded to fp16, each by half a unit in the last place.
    tolerance = 2e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())
    assert (actual[~visible_keys(case, inputs).any(-1)] == 0).all()

    moved = dict(inputs)
    move_pages(moved)
    assert torch.equal(launch(**moved, num_splits=case.splits or 1, least=1), actual), (
        "the result depends on where pages lie"
    )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_kernel(case, dtype):
    interpret(check_kernel, case, dtype)


def check_splits_agree():
    from deepseek_accel.kernels.mla_attention import launch

    inputs = case_inputs(LatentCase((257, 100, 3, 0), 16, queries=2), torch.float32)
    whole = launch(**inputs, num_splits=1)
    for num_splits, least in ((2, 1), (5, 1), (32, 1), (5, 2), (5, 100), (32, None), (None, None)):
        actual = launch(**inputs, num_splits=num_splits, least=least)
        torch.testing.assert_close(actual, whole, rtol=1e-5, atol=1e-6)
    nan = dict(inputs, q_latent=torch.full_like(inputs["q_latent"], float("nan")))
    for num_splits in (1, 4):
        out = launch(**nan, num_splits=num_splits)
        assert out[:2].isnan().all(), "NaN queries must not turn into numbers"


def test_splits_agree():
    """The number of parts changes rounding only, the automatic choice included; NaN inputs stay visible."""
    interpret(check_splits_agree)


def check_address():
    """Pages are found at the address; `storage` is then another tensor, of NaN."""
    from deepseek_accel.kernels.mla_attention import launch

    inputs = case_inputs(LatentCase((70, 40, 0), 16, starts=(35, 7, 0)), torch.float32)
    address = torch.tensor([inputs["storage"].data_ptr()])
    moved = dict(inputs, storage=torch.full_like(inputs["storage"][:1], float("nan")), address=address)
    for num_splits in (1, 4):
        assert torch.equal(launch(**moved, num_splits=num_splits), launch(**inputs, num_splits=num_splits))


def test_address_says_where_the_pages_are():
    interpret(check_address)


def projected_error(dtype: torch.dtype) -> float:
    """The kernels that project as they merge, against attention and then projection. Parts without keys are NaN."""
    from deepseek_accel.kernels.mla_attention import launch

    worst = 0.0
    cases = [case for case in CASES if case.heads <= 16]
    # More tokens than a program per row pays for, with an idle row, in two tiles of which one is not full.
    cases += [LatentCase((33, 70, 0, 17, 129, 1) * 3, 16), LatentCase((65, 130), 64, queries=7, heads=3)]
    for index, case in enumerate(cases):
        inputs = case_inputs(case, dtype, "cpu", index)
        generator = torch.Generator().manual_seed(index)
        w_uv = torch.randn(case.heads, 24, case.rank, generator=generator).to(dtype)
        expected = project_values(latent_attention_reference(**inputs), w_uv).float()
        for num_splits, least in ((1, None), (4, 1), (8, 2)):
            ours = launch(**inputs, w_uv=w_uv, num_splits=num_splits, least=least).float()
            worst = max(worst, ((ours - expected).abs().max() / expected.abs().max().clamp_min(1e-3)).item())
    return worst


def test_projection_as_the_parts_are_merged():
    assert interpret(projected_error, torch.float32) < 1e-5
    assert interpret(projected_error, torch.float16) < 5e-3


def test_splits_of_a_graph():
    """Some for one row, never none, and no more programs than processors (8 here)."""
    device = torch.device("cpu")
    assert graph_splits(1, 16, device) == 8
    assert graph_splits(3, 16, device) == 2
    assert graph_splits(1, 128, device) == 4, "128 heads are two row blocks"
    assert graph_splits(1, 32, device, 8) == 1
    assert graph_splits(1, 32, device, 2) == 4
    assert graph_splits(128, 16, device) == 1
    assert graph_splits(8, 16, device) == 1
    assert graph_splits(8, 16, device, fp8="e4m3") == 2, "two programs a processor, if they decode"
    assert graph_splits(1, 16, device, fp8="e4m3") == 8
    assert graph_splits(8, 16, device, 1, 2, "e4m3") == 1, "two queries are 32 rows"
