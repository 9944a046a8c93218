"""FP8 pages on a GPU: the numbers, the kernels by dtype and format, graphs, and whole models.

Decoding is assembly that Triton's interpreter does not run: here it is checked for every code.
"""

import functools

import pytest
import torch

from deepseek_accel import optimize, report
from deepseek_accel.cache import paged_cache
from deepseek_accel.ops import entry_write, gqa_attention, latent_write, mla_attention, prefill_write
from deepseek_accel.ops.choice import why_not_triton
from deepseek_accel.ops.fp8 import CODES, decode_heads, decode_latents, encode_heads, encode_latents, quantize
from deepseek_accel.ops.gqa_attention import GroupedCase
from deepseek_accel.ops.mla_attention import LatentCase
from deepseek_accel.passes import DEFAULTS as PASSES
from deepseek_accel.testing import tiny_model
from deepseek_accel.versions import cache_argument

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if reason := why_not_triton(torch.device("cuda", torch.cuda.current_device())):
    pytest.skip(reason, allow_module_level=True)

from deepseek_accel.kernels import entry_write as entry_kernel
from deepseek_accel.kernels import gqa_attention as gqa_kernel
from deepseek_accel.kernels import latent_write as latent_kernel
from deepseek_accel.kernels import mla_attention as mla_kernel
from deepseek_accel.kernels import prefill_write as prefill_kernel
from deepseek_accel.kernels.fp8 import VARIANTS, has_conversions, round_trip_kernel

CACHE = cache_argument()
NATIVE = has_conversions(torch.cuda.get_device_capability())
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
all_kinds = pytest.mark.parametrize("kind", CODES)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def nan_filled_memory():
    torch.use_deterministic_algorithms(True)  # torch.empty then holds NaN
    with torch.no_grad():
        yield
    torch.use_deterministic_algorithms(False)


def distance(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


@all_kinds
@all_dtypes
@pytest.mark.parametrize("pure", [True, False])
@pytest.mark.parametrize("native", [True, False])
def test_every_code(kind, dtype, pure, native):
    """Vectors that hold every number of the format, at several scales: scale, codes and numbers are the reference's."""
    numbers = torch.arange(256, dtype=torch.uint8).view(CODES[kind]).float()
    numbers = numbers[numbers.isfinite()]
    noise = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 1, 256)
    values = torch.zeros(67, 256)
    values[:64] = noise
    # times two to some power, so that fp16 holds the numbers too
    values[64, : len(numbers)], values[65, : len(numbers)] = numbers / 2**3, numbers
    values = values.to(dtype)
    values[66, 17] = torch.nan
    ours = values.cuda()
    codes = torch.empty(values.shape, dtype=torch.uint8, device="cuda")
    scales, back = torch.empty(len(values), device="cuda"), torch.empty_like(ours)
    round_trip_kernel[(len(values),)](ours, codes, scales, back, 256, 256, VARIANTS[kind], pure, native and NATIVE)
    wanted, wanted_scales = quantize(values, kind)
    assert torch.equal(scales.cpu()[:66], wanted_scales[:66, 0]) and scales[66].isnan()
    assert torch.equal(codes.cpu()[:66], wanted[:66])
    decoded = wanted.view(CODES[kind]).float()
    assert torch.equal(back.cpu().float()[:66], decoded[:66])
    # torch on the GPU encodes to the same bits
    theirs, their_scales = quantize(ours, kind)
    assert torch.equal(theirs.cpu()[:66], wanted[:66]) and torch.equal(their_scales.cpu()[:66], wanted_scales[:66])


# Attention

LENGTHS = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 127, 128, 129, 257, 0, 2000)
LONG = [
    *(LatentCase(LENGTHS, page, 1, heads, 512, 64) for page in (16, 64) for heads in (16, 128)),
    LatentCase(LENGTHS, 64, 7, 16, 512, 64),
    LatentCase((9000, 8000), 64, 1, 16, 512, 64),
    *(GroupedCase(LENGTHS, 64, queries, 32, 8, 128, 128) for queries in (1, 7)),
]
CASES = [*mla_attention.CASES, *gqa_attention.CASES, *LONG]


def case_name(case):
    changed = {name: value for name, value in case._asdict().items() if value != case._field_defaults.get(name)}
    lengths = changed.pop("lengths")
    label = "long" if lengths is LENGTHS else str(lengths)
    return f"{type(case).__name__}-{label}-" + "-".join(f"{k}{v}" for k, v in changed.items()).replace(" ", "")


def fp8_inputs(case, dtype, kind):
    """(launch, its arguments, float64 arguments of the reference over the decoded pages, the reference)."""
    if isinstance(case, LatentCase):
        inputs = mla_attention.case_inputs(case, dtype, "cuda")
        latent, k_rope = inputs["storage"].split([case.rank, case.rope], -1)
        storage = encode_latents(latent, k_rope, kind)
        plain = decode_latents(storage, kind, case.rank, case.rope, dtype, torch.float64)
        launch, reference = mla_kernel.launch, mla_attention.latent_attention_reference
    else:
        inputs = gqa_attention.case_inputs(case, dtype, "cuda")
        sizes = (case.kv_heads, case.head_dim, case.value_dim)
        keys, values = inputs["storage"].split([case.kv_heads * case.head_dim, case.kv_heads * case.value_dim], -1)
        storage = encode_heads(keys.unflatten(-1, sizes[:2]), values.unflatten(-1, (sizes[0], sizes[2])), kind)
        plain = torch.cat([part.flatten(-2) for part in decode_heads(storage, kind, *sizes, torch.float64)], -1)
        launch, reference = gqa_kernel.launch, gqa_attention.paged_gqa_attention_reference
    wide = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
    mask = inputs["mask"]
    if mask is not None and mask.dtype != torch.bool:
        wide["mask"] = wide["mask"].masked_fill(mask <= torch.finfo(mask.dtype).min, float("-inf"))
    return launch, inputs | {"storage": storage, "fp8": kind}, wide | {"storage": plain}, reference


@all_kinds
@all_dtypes
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_attention(case, dtype, kind):
    """Against float64 over the same codes: what is left is the rounding of queries, weights and output."""
    launch, inputs, wide, reference = fp8_inputs(case, dtype, kind)
    expected = reference(**wide)
    allowed = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
    for num_splits in {case.splits, 1, None}:
        actual = launch(**inputs, num_splits=num_splits)
        assert actual.dtype == dtype and actual.isfinite().all()
        assert distance(actual, expected) <= allowed
        assert (actual[expected == 0] == 0).all()
        assert torch.equal(launch(**inputs, num_splits=num_splits), actual), "repeats differ"


@all_kinds
@pytest.mark.parametrize("heads", [16, 128])
def test_attention_projects(heads, kind):
    """The path of a decoding step: parts merged and projected into values in one launch."""
    case = LatentCase((300, 1, 2000), 64, 1, heads, 512, 64)
    launch, inputs, wide, reference = fp8_inputs(case, torch.bfloat16, kind)
    w_uv = torch.randn(heads, 128, 512, device="cuda").mul(512**-0.5).bfloat16()
    expected = mla_attention.project_values(reference(**wide), w_uv.double())
    for num_splits in (1, 8, 128):
        assert distance(launch(**inputs, w_uv=w_uv, num_splits=num_splits), expected) < 1e-2


@all_kinds
@pytest.mark.parametrize("splits", [1, 8, 128])
@pytest.mark.parametrize(
    "case",
    [LatentCase((300, 0, 90), 64, 1, 16, 512, 64), GroupedCase((300, 0, 90), 64, 1, 32, 8, 128, 128)],
    ids=case_name,
)
def test_graph_follows_a_storage_that_moves(case, splits, kind):
    launch, inputs, _, _ = fp8_inputs(case, torch.bfloat16, kind)
    inputs |= {"num_splits": splits, "address": torch.tensor([inputs["storage"].data_ptr()], device="cuda")}
    launch(**inputs)
    torch.cuda.synchronize()
    torch.use_deterministic_algorithms(False)  # filling memory inside a graph is not what is tested
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(**inputs)
    moved = inputs["storage"].clone()
    inputs["storage"].fill_(255)
    inputs["address"].copy_(torch.tensor([moved.data_ptr()]))
    inputs["lengths"].copy_(torch.tensor([65, 0, 33]))
    graph.replay()
    expected = launch(**inputs | {"storage": moved, "address": None})
    assert out.isfinite().all() and torch.equal(out, expected) and (out[1] == 0).all()


# Writing


def check_rows(ours, expected, numbers):
    """Bytes that were left alone are alike; numbers (a function of rows) differ by at most one code, and rarely."""
    untouched = (expected == 255).all(-1)
    assert torch.equal((ours == 255).all(-1), untouched) and not untouched.all()
    actual, wanted = numbers(ours[~untouched]), numbers(expected[~untouched])
    assert actual.isfinite().all()
    step = wanted.abs().amax(-1, keepdim=True)
    assert ((actual - wanted).abs() <= step / 4).all() and distance(actual, wanted) < 2e-2


def bytes_like(storage, width):
    return torch.full((*storage.shape[:-1], width), 255, dtype=torch.uint8, device="cuda")


def rotation(batch, queries, half):
    angle = torch.rand(batch, queries, half, device="cuda") * 6
    return angle.cos(), angle.sin()


@all_kinds
@all_dtypes
@pytest.mark.parametrize("tokens", [(1, 1), (3, 2), (200, 1)], ids=str)
def test_latent_writes(tokens, dtype, kind):
    """DeepSeek-V2-Lite's sizes, of a decoding step and of a prompt. The last token has no slot."""
    torch.manual_seed(0)
    batch, queries = tokens
    heads, nope, rope, rank = 16, 128, 64, 512
    count = batch * queries
    query = torch.randn(batch, queries, heads, nope + rope, device="cuda").to(dtype)
    compressed = torch.randn(batch, queries, rank + rope, device="cuda").to(dtype)
    weight = (1 + 0.1 * torch.randn(rank, device="cuda")).to(dtype)
    w_uk = torch.randn(heads, nope, rank, device="cuda").mul(0.05).to(dtype)
    cos, sin = rotation(batch, queries, rope // 2)
    width = encode_latents(compressed[:1, :1, :rank], compressed[:1, :1, rank:], kind).shape[-1]
    pages = 2 + count // 64
    slots = torch.randperm(pages * 64, device="cuda")[:count]
    if count > 1:
        slots[-1] = -1
    ours, expected, prompt = (torch.full((pages, 64, width), 255, dtype=torch.uint8, device="cuda") for _ in range(3))
    fixed = (weight, 1e-6, cos, sin, "pairs")
    latent_kernel.launch(query, compressed, *fixed, w_uk, ours, slots, fp8=kind)
    latent_write.latent_write_reference(query, compressed, *fixed, w_uk, expected, slots, kind)
    numbers = functools.partial(decode_latents, kind=kind, rank=rank, rope=rope, dtype=dtype, out_dtype=torch.float64)
    check_rows(ours, expected, numbers)
    given = (query.clone(), compressed.clone())
    prefill_kernel.launch(*given, *fixed, prompt, slots, kind)
    check_rows(prompt, expected, numbers)
    # what the pages hold is what the piece itself reads, encoded: the same bits
    used = slots >= 0
    entries = given[1].flatten(0, 1)[used]
    held = prompt.flatten(0, 1)[slots[used]]
    assert torch.equal(held[:, :rank], quantize(entries[:, :rank], kind)[0])
    plain = (query.clone(), compressed.clone())
    prefill_write.prefill_write_reference(*plain, *fixed, prompt.new_full((pages, 64, width), 255), slots, kind)
    assert distance(given[1], plain[1]) < {torch.float32: 1e-6}.get(dtype, 4e-3)


@all_kinds
@all_dtypes
@pytest.mark.parametrize("case", entry_write.CASES, ids=str)
def test_grouped_writes(case, dtype, kind):
    query, key, value, cos, sin, storage, slots = entry_write.case_inputs(case, dtype, "cuda")
    sizes = (case.kv_heads, case.head_dim, case.value_dim)
    width = encode_heads(key[:1, :1], value[:1, :1], kind).shape[-1]
    ours, expected = bytes_like(storage, width), bytes_like(storage, width)
    rotated = entry_kernel.launch(query, key, value, cos, sin, ours, slots, fp8=kind)
    wanted = entry_write.entry_write_reference(query, key, value, cos, sin, expected, slots, kind)
    assert distance(rotated, wanted) < {torch.float32: 1e-6}.get(dtype, 4e-3)

    def numbers(rows):
        return torch.cat([part.flatten(-2) for part in decode_heads(rows, kind, *sizes, torch.float64)], -1)

    check_rows(ours, expected, numbers)


# Models


def config(dtype, graphs=True):
    options = {name: {} for name in PASSES if graphs or name != "cuda_graphs"}
    return options | {"kv_cache": {"page_size": 16, "dtype": dtype}, "allow_skips": True}


def prompts():
    ids = torch.randint(2, 128, (3, 23), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :14], mask[2, :5] = 0, 0
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}


def run(model, **options):
    defaults = dict(do_sample=False, max_new_tokens=20, pad_token_id=0, return_dict_in_generate=True)
    return model.generate(**prompts(), **defaults | {"output_logits": True} | options)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "llama", "qwen2"])
def test_models(family, dtype):
    """fp32: our loop with and without graphs against stock's loop and attention, all on FP8 pages."""
    torch.use_deterministic_algorithms(False)
    theirs = tiny_model(family).cuda()
    expected = run(theirs, **{CACHE: paged_cache(theirs, 16, dtype=dtype)})
    for graphs in (False, True):
        model = optimize(tiny_model(family).cuda(), config(dtype, graphs))
        ours = run(model)
        assert getattr(ours, CACHE).fp8 == dtype[4:]
        assert distance(ours.logits[0], expected.logits[0]) < 1e-4
        assert distance(ours.logits[1], expected.logits[1]) < 1e-2
        tokens = run(model, return_dict_in_generate=False, output_logits=False)
        assert torch.equal(tokens, run(model, return_dict_in_generate=False, output_logits=False))
        counters = report(model).counters
        assert not [name for name in counters if "stock loop" in name]
        assert (counters.get("cuda_graphs: replays", 0) > 0) == graphs


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_graphs_are_of_one_format(family):
    """The same model on caches of three formats in turn: no graph of another format is replayed."""
    torch.use_deterministic_algorithms(False)
    model = optimize(tiny_model(family).cuda(), config(None))
    first = {}
    for _ in range(2):
        for dtype in (None, "fp8_e4m3", "fp8_e5m2"):
            ours = run(model, **{CACHE: paged_cache(model, 16, dtype=dtype)})
            logits = torch.stack(ours.logits)
            assert torch.equal(first.setdefault(dtype, logits), logits)
    assert len({tuple(logits.flatten()[-5:].tolist()) for logits in first.values()}) == 3


def test_grown_and_reordered_pages():
    """Storages that grow under a graph, and beams in stock's loop."""
    torch.use_deterministic_algorithms(False)
    model = optimize(tiny_model("deepseek_v3").cuda(), config("fp8_e4m3"))
    cache = paged_cache(model, 16, dtype="fp8_e4m3")
    grown = run(model, max_new_tokens=200, **{CACHE: cache})
    reserved = run(model, max_new_tokens=200)
    assert torch.equal(grown.sequences, reserved.sequences)
    beams = [run(model, num_beams=3, max_new_tokens=10).sequences for _ in range(2)]
    assert torch.equal(*beams)
