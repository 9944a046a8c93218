"""The attention kernels on a GPU: accuracy by dtype, repeatability, large pools, long contexts, strides, graphs."""

import pytest
import torch

from deepseek_accel.ops import gqa_attention, mla_attention
from deepseek_accel.ops.choice import triton_missing
from deepseek_accel.ops.gqa_attention import GroupedCase
from deepseek_accel.ops.mla_attention import LatentCase

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 0) or triton_missing():
    pytest.skip(triton_missing() or "the kernels need compute capability 8.0", allow_module_level=True)

from deepseek_accel.kernels import gqa_attention as gqa_kernel
from deepseek_accel.kernels import mla_attention as mla_kernel

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LENGTHS = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 127, 128, 129, 257, 0, 2000)  # K18
K18 = [
    *(LatentCase(LENGTHS, page, 1, heads, 512, 64) for page in (16, 64, 256) for heads in (16, 128)),
    *(LatentCase(LENGTHS, page, 7, 16, 512, 64) for page in (16, 64, 256)),
    *(GroupedCase(LENGTHS, page, queries, 32, 8, 128, 128) for page in (16, 64, 256) for queries in (1, 7)),
]  # fmt: skip
CASES = [*mla_attention.CASES, *gqa_attention.CASES, *K18]


def parts_of(case):
    """(case_inputs, launch, reference) of a case's op."""
    if isinstance(case, LatentCase):
        return mla_attention.case_inputs, mla_kernel.launch, mla_attention.latent_attention_reference
    return gqa_attention.case_inputs, gqa_kernel.launch, gqa_attention.paged_gqa_attention_reference


def case_name(case):
    changed = {name: value for name, value in case._asdict().items() if value != case._field_defaults.get(name)}
    lengths = changed.pop("lengths")
    label = "long" if lengths is LENGTHS else str(lengths)
    return f"{type(case).__name__}-{label}-" + "-".join(f"{k}{v}" for k, v in changed.items()).replace(" ", "")


def in_float64(inputs):
    wide = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
    mask = inputs["mask"]
    if mask is not None and mask.dtype != torch.bool:  # the value that hides is the minimum of the mask's own dtype
        wide["mask"] = wide["mask"].masked_fill(mask <= torch.finfo(mask.dtype).min, float("-inf"))
    return wide


def torch_attention(case, inputs):
    """What stock torch computes in the same dtype: SDPA over gathered, expanded keys. NaN where nothing is visible."""
    lengths, starts, mask = inputs["lengths"], inputs["starts"], inputs["mask"]
    entries, _ = mla_attention.gather_entries(
        inputs["storage"], inputs["block_table"], lengths, inputs["max_length"], starts, None
    )
    hidden, bias = mla_attention.hidden_keys(
        lengths, 0, case.queries, entries.shape[1], case.causal, starts, mask, None
    )
    if isinstance(case, LatentCase):
        query = torch.cat((inputs["q_latent"], inputs["q_rope"]), -1).transpose(1, 2)
        keys, values = entries[:, None], entries[:, None, :, : case.rank]
        keys, values = (x.expand(-1, case.heads, -1, -1) for x in (keys, values))
    else:
        query = inputs["query"].transpose(1, 2)
        keys, values = entries.split((case.kv_heads * case.head_dim, case.kv_heads * case.value_dim), -1)
        group = case.heads // case.kv_heads
        keys, values = (
            x.unflatten(-1, (case.kv_heads, -1)).transpose(1, 2).repeat_interleave(group, 1) for x in (keys, values)
        )
    added = torch.zeros_like(hidden, dtype=query.dtype) if bias is None else bias
    added = added.masked_fill(hidden, float("-inf"))[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=added, scale=inputs["scale"])
    return out.transpose(1, 2)


def relative_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


@pytest.fixture(autouse=True)
def nan_filled_memory():
    torch.use_deterministic_algorithms(True)  # torch.empty then holds NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_accuracy(case, dtype):
    """At most twice stock torch's error against float64, with the case's splits and with the automatic choice."""
    case_inputs, launch, reference = parts_of(case)
    inputs = case_inputs(case, dtype, "cuda")
    expected = reference(**in_float64(inputs))
    stock = torch_attention(case, inputs)
    seen = ~stock.isnan()
    allowed = 2 * relative_error(stock[seen], expected[seen]) + torch.finfo(dtype).eps / 4
    for num_splits in {case.splits, 1, None}:
        actual = launch(**inputs, num_splits=num_splits)
        assert actual.isfinite().all() and (actual[~seen] == 0).all()
        assert relative_error(actual[seen], expected[seen]) <= allowed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        LatentCase(LENGTHS, 64, 1, 16, 512, 64),
        LatentCase(LENGTHS, 64, 1, 128, 512, 64),
        GroupedCase(LENGTHS, 64, 1, 32, 8, 128, 128),
    ],
    ids=case_name,
)
def test_repeats_and_page_order_keep_the_bits(case, dtype):
    case_inputs, launch, _ = parts_of(case)
    inputs = case_inputs(case, dtype, "cuda")
    expected = launch(**inputs)
    for _ in range(50):
        assert torch.equal(launch(**inputs), expected)
    num_pages = inputs["storage"].shape[0]
    order = torch.randperm(num_pages, device="cuda")
    inputs["storage"] = inputs["storage"][order]
    table = inputs["block_table"]
    inputs["block_table"] = torch.where(
        table < num_pages, order.argsort()[table.clamp(max=num_pages - 1).long()], table
    ).int()
    assert torch.equal(launch(**inputs), expected)


@pytest.mark.parametrize(
    "case", [LatentCase((130, 70), 64, 1, 16, 512, 64), GroupedCase((130, 70), 64, 1, 32, 8, 128, 128)], ids=case_name
)
def test_pool_beyond_two_to_the_31_elements(case):
    case_inputs, launch, _ = parts_of(case)
    inputs = case_inputs(case, torch.bfloat16, "cuda")
    expected = launch(**inputs)
    pages, page_size, width = inputs["storage"].shape
    num_pages = 2**31 // (page_size * width) + 64
    if torch.cuda.mem_get_info()[0] < num_pages * page_size * width * 2 + (1 << 30):
        pytest.skip("needs 6 GB of free GPU memory")
    pool = torch.full((num_pages, page_size, width), float("nan"), dtype=torch.bfloat16, device="cuda")
    pool[-pages:] = inputs["storage"]
    table = inputs["block_table"]
    inputs |= {"storage": pool, "block_table": torch.where(table < pages, table + (num_pages - pages), table)}
    assert torch.equal(launch(**inputs), expected)


@pytest.mark.parametrize("case", [
    LatentCase((163_840,), 64, 1, 16, 512, 64), LatentCase((163_840,), 64, 1, 128, 512, 64),
    GroupedCase((131_072,), 64, 1, 32, 8, 128, 128),
], ids=case_name)  # fmt: skip
def test_long_context(case):
    case_inputs, launch, reference = parts_of(case)
    inputs = case_inputs(case, torch.bfloat16, "cuda")
    error = relative_error(launch(**inputs), reference(**in_float64(inputs)))
    assert error <= torch.finfo(torch.bfloat16).eps


def test_strides_of_the_queries_keep_the_bits():
    """M05: queries that are slices, transposes or expanded (stride 0) give what their contiguous copies give."""
    case = LatentCase((130, 70), 64, 3, 16, 512, 64)
    inputs = mla_attention.case_inputs(case, torch.bfloat16, "cuda")
    shared_rope = inputs["q_rope"][:, :, :1].expand(-1, -1, 16, -1)
    for q_rope in (inputs["q_rope"], shared_rope):
        strided = mla_kernel.launch(**inputs | {"q_rope": q_rope})
        copies = {"q_latent": inputs["q_latent"].contiguous(), "q_rope": q_rope.contiguous()}
        assert torch.equal(strided, mla_kernel.launch(**inputs | copies))
        transposed = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in copies.items()}
        assert torch.equal(strided, mla_kernel.launch(**inputs | transposed))
    grouped = gqa_attention.case_inputs(GroupedCase((130, 70), 64, 3, 16, 4, 192, 128), torch.bfloat16, "cuda")
    contiguous = gqa_kernel.launch(**grouped | {"query": grouped["query"].contiguous()})
    assert torch.equal(gqa_kernel.launch(**grouped), contiguous) and contiguous.shape[-1] == 128


@pytest.mark.parametrize(
    "case",
    [LatentCase((300, 1, 90), 64, 1, 16, 512, 64), GroupedCase((300, 1, 90), 64, 1, 32, 8, 128, 128)],
    ids=case_name,
)
def test_graph_follows_lengths_and_tables(case):
    """Captured once with max_length as a bound, replayed after lengths and block tables have changed in place."""
    case_inputs, launch, _ = parts_of(case)
    inputs = case_inputs(case, torch.bfloat16, "cuda") | {"max_length": 4096}
    launch(**inputs)
    torch.cuda.synchronize()
    torch.use_deterministic_algorithms(False)  # filling memory inside a graph is not what is tested
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(**inputs)
    graph.replay()
    assert torch.equal(out, launch(**inputs))
    inputs["lengths"].copy_(torch.tensor([64, 0, 33]))
    inputs["block_table"][0, 0] = inputs["block_table"][0, 1].clone()
    graph.replay()
    assert torch.equal(out, launch(**inputs)) and (out[1] == 0).all()


@pytest.mark.parametrize("splits", [1, 8, 128])
@pytest.mark.parametrize(
    "case",
    [LatentCase((300, 0, 90), 64, 1, 16, 512, 64), GroupedCase((300, 0, 90), 64, 1, 32, 8, 128, 128)],
    ids=case_name,
)
def test_graph_follows_a_storage_that_moves(case, splits):
    """Captured with an address; then the pages move, the old ones turn NaN, and lengths change."""
    case_inputs, launch, _ = parts_of(case)
    inputs = case_inputs(case, torch.bfloat16, "cuda") | {"num_splits": splits}
    inputs["address"] = torch.tensor([inputs["storage"].data_ptr()], device="cuda")
    launch(**inputs)
    torch.cuda.synchronize()
    torch.use_deterministic_algorithms(False)  # filling memory inside a graph is not what is tested
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(**inputs)
    moved = inputs["storage"].clone()
    inputs["storage"].fill_(float("nan"))
    inputs["address"].copy_(torch.tensor([moved.data_ptr()]))
    inputs["lengths"].copy_(torch.tensor([65, 0, 33]))
    graph.replay()
    expected = launch(**inputs | {"storage": moved, "address": None})
    assert out.isfinite().all() and torch.equal(out, expected) and (out[1] == 0).all()


def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = LatentCase((130, 70), 64, 1, 16, 512, 64)
    first, second = (
        mla_kernel.launch(**mla_attention.case_inputs(case, torch.bfloat16, d)) for d in ("cuda:0", "cuda:1")
    )
    assert torch.equal(first.cpu(), second.cpu())
