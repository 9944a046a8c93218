"""Caches that evict on a GPU: scores of the kernels in bf16, graphs against the eager loop, memory over many calls."""

import functools

import pytest
import torch

from deepseek_accel import optimize, report
from deepseek_accel.cache import Entropy, TopAttention, Window, paged_cache
from deepseek_accel.ops import claim as claims
from deepseek_accel.ops import gqa_attention, mla_attention
from deepseek_accel.ops.choice import why_not_triton
from deepseek_accel.ops.gqa_attention import GroupedCase
from deepseek_accel.ops.key_mass import KeyScores, key_mass
from deepseek_accel.ops.mla_attention import LatentCase
from deepseek_accel.passes import DEFAULTS as PASSES
from deepseek_accel.testing import tiny_model
from deepseek_accel.versions import cache_argument

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if reason := why_not_triton(torch.device("cuda", torch.cuda.current_device())):
    pytest.skip(reason, allow_module_level=True)

CACHE = cache_argument()
POLICIES = (Window(2, 30), TopAttention(64, 2, 6), Entropy(64, 2, 6))
all_policies = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
two_families = pytest.mark.parametrize("family", ["deepseek_v3", "llama"])


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def options(graphs, **kv_cache):
    passes = {name: {} for name in PASSES if graphs or name != "cuda_graphs"}
    return passes | {"kv_cache": {"page_size": 16, **kv_cache}, "allow_skips": True}


@functools.cache
def model_of(family, graphs):
    return optimize(tiny_model(family).cuda(), options(graphs))


def prompt(rows, length, seed=0):
    return torch.randint(2, 126, (rows, length), generator=torch.Generator().manual_seed(seed)).cuda()


def generate(model, ids, new, policy=None, **more):
    cache = {} if policy is None else {CACHE: paged_cache(model, 16, eviction=policy)}
    more = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **more}
    return model.generate(ids, max_new_tokens=new, return_dict_in_generate=True, **cache, **more)


@pytest.mark.parametrize("case", claims.CASES, ids=str)
def test_claim(case):
    ours, expected = claims.case_inputs(case, "cuda"), claims.case_inputs(case)
    claims.claim(*ours)
    claims.claim_reference(*expected)
    for actual, wanted in zip(ours, expected, strict=True):
        if isinstance(actual, torch.Tensor):
            assert torch.equal(actual.cpu().nan_to_num(-5), wanted.nan_to_num(-5))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        LatentCase((0, 1, 3000), 64, heads=16, rank=512, rope=64, splits=32),
        LatentCase((700, 65), 64, heads=128, rank=512, rope=64, splits=8),
        GroupedCase((5, 2049), 64, heads=32, kv_heads=8, head_dim=128, value_dim=128, splits=16),
    ],
    ids=["v2-lite", "v3", "llama-8b"],
)
def test_scores(case, dtype, entropy):
    """What the attention kernels leave, against `key_mass` of the same entries in fp32; repeats are bit-equal."""
    latent = isinstance(case, LatentCase)
    module, run = (mla_attention, mla_attention.latent_attention) if latent else (gqa_attention, None)
    inputs = module.case_inputs(case, dtype, "cuda")
    run = run or gqa_attention.paged_gqa_attention
    rows, room = len(case.lengths), max(case.lengths) + 7
    found = []
    for _ in range(2):
        scores = torch.full((rows, room), 2.0, device="cuda")
        watch = KeyScores(scores, 0.5, entropy, torch.tensor([rows], dtype=torch.int32, device="cuda"))
        out = run(**inputs, num_splits=case.splits, watch=watch)
        found.append(scores)
    assert torch.equal(*found)
    torch.testing.assert_close(out, run(**inputs, num_splits=case.splits), atol=2e-2, rtol=2e-2)
    for row, length in enumerate(case.lengths):
        pages = inputs["block_table"][row, : -(-length // case.page_size)].long()
        entries = inputs["storage"][pages].flatten(0, 1)[:length].float()
        assert (found[0][row, length:] == 2).all()
        if length == 0:
            continue
        if latent:
            query, keys = torch.cat((inputs["q_latent"], inputs["q_rope"]), -1), entries[None, None]
        else:
            size = case.kv_heads * case.head_dim
            query, keys = inputs["query"], entries[:, :size].unflatten(-1, (case.kv_heads, -1)).transpose(0, 1)[None]
        wanted = key_mass(query[row : row + 1].float(), keys, inputs["scale"], entropy=entropy)[1][0]
        torch.testing.assert_close(
            found[0][row, :length] - 1, wanted, atol=2e-3 if dtype != torch.float32 else 1e-4, rtol=0
        )


@two_families
@all_policies
def test_graphs_give_the_tokens_of_the_eager_loop(family, policy):
    """fp32, prompts below and above the budget, one row and several; then the cache goes on in another call."""
    fast, eager = model_of(family, True), model_of(family, False)
    for rows, length in ((1, 20), (3, 90), (2, 200)):
        ids = prompt(rows, length)
        ours, theirs = generate(fast, ids, 40, policy), generate(eager, ids, 40, policy)
        assert torch.equal(ours.sequences, theirs.sequences), (rows, length)
        caches = ours[CACHE], theirs[CACHE]
        assert caches[0].tokens_held == caches[1].tokens_held and caches[0].length == caches[1].length == length + 39
        for one, other in zip(caches[0].kept, caches[1].kept, strict=True):
            kept = [k.positions[:, : k.held].sort().values for k in (one, other)]
            assert torch.equal(*kept)
        more = [
            model.generate(out.sequences, max_new_tokens=9, do_sample=False, pad_token_id=0, **{CACHE: cache})
            for model, out, cache in ((fast, ours, caches[0]), (eager, theirs, caches[1]))
        ]
        assert torch.equal(*more)
    assert report(fast).counters.get("cuda_graphs: replays", 0) > 0
    eager_loops = [name for name in report(fast).counters if "eager loop" in name]
    assert all("padded rows" in name for name in eager_loops), eager_loops


@two_families
def test_padded_rows_take_the_eager_loop(family):
    model, ids = model_of(family, True), prompt(2, 90)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    reason = "cuda_graphs: eager loop (padded rows in a cache that evicts)"
    before = report(model).counters.get(reason, 0)
    out = generate(model, ids, 20, TopAttention(64, 2, 6), attention_mask=mask)
    expected = generate(model_of(family, False), ids, 20, TopAttention(64, 2, 6), attention_mask=mask)
    assert torch.equal(out.sequences, expected.sequences)
    assert report(model).counters.get(reason, 0) == before + 1


@two_families
def test_plain_and_evicting_calls_take_turns(family):
    """Each has its own graphs and buffers; page addresses are told to whichever runs."""
    model, ids = model_of(family, True), prompt(2, 120)
    plain, evicting = generate(model, ids, 20), generate(model, ids, 20, TopAttention(64, 2, 6))
    for _ in range(2):
        assert torch.equal(generate(model, ids, 20).sequences, plain.sequences)
        assert torch.equal(generate(model, ids, 20, TopAttention(64, 2, 6)).sequences, evicting.sequences)


@two_families
def test_an_end_of_sequence_takes_the_last_step_back(family):
    model, policy = model_of(family, True), TopAttention(64, 2, 6)
    whole = generate(model, prompt(1, 90), 20, policy).sequences[0, 90:].tolist()
    end = whole[7]
    out = generate(model, prompt(1, 90), 20, policy, eos_token_id=end)
    stop = whole.index(end)
    assert out.sequences.shape[1] == 90 + stop + 1 and out[CACHE].length == 90 + stop


@all_policies
def test_nothing_leaks(policy):
    """200 calls of mixed sizes: memory after the last ones is what it was after the first ones."""
    model = optimize(tiny_model("deepseek_v3").cuda(), options(True, eviction=policy))
    sizes = [(1, 30), (2, 200), (4, 90), (1, 400)]
    held = []
    for i in range(200):
        rows, length = sizes[i % len(sizes)]
        generate(model, prompt(rows, length, seed=i), 6)
        if i in (19, 199):
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
    assert held[1] <= held[0]
