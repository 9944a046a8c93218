"""Caches that evict: what is held, what it costs, what may be taken back, and that all paths agree."""

import copy
import pickle
import weakref

import pytest
import torch

from deepseek_accel import AccelError, CacheFullError, OptimizeConfig, PlanError, optimize, plan, report, restore
from deepseek_accel.cache import Entropy, TopAttention, Window, paged_cache
from deepseek_accel.cache.eviction import divide_by_reach, reach_profile
from deepseek_accel.generation import decode
from deepseek_accel.passes import DEFAULTS as PASSES
from deepseek_accel.passes.attention import Attention
from deepseek_accel.passes.kv_cache import KVCache
from deepseek_accel.testing import relative_error, tiny_model
from deepseek_accel.versions import cache_argument

CACHE = cache_argument()
PAGE = 16
POLICIES = (Window(2, 18), TopAttention(20, 2, 6), Entropy(20, 2, 6))
two_families = pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
all_policies = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)


@pytest.fixture(scope="module")
def models():
    passes = {name: {} for name in PASSES} | {"kv_cache": {"page_size": PAGE}, "allow_skips": True}
    return {family: optimize(tiny_model(family), passes) for family in ("deepseek_v3", "llama")}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def prompt(rows, length, seed=0):
    return torch.randint(2, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


def feed(model, cache, ids, **options):
    return model(ids, **{CACHE: cache}, **options).logits


def one_by_one(model, cache, ids):
    return torch.cat([feed(model, cache, ids[:, i : i + 1]) for i in range(ids.shape[1])], 1)


def tokens_of(cache):
    return [kept.positions[:, : kept.held].sort().values.tolist() for kept in cache.kept]


# Policies


class Unscored(Window):
    scores = "age"


def test_policies_say_what_is_wrong():
    for make, what in (
        (lambda: Window(recent=0), "recent of Window must be an integer >= 1, got 0"),
        (lambda: Window(sinks=-1), "sinks of Window"),
        (lambda: TopAttention(budget=True), "budget of TopAttention"),
        (lambda: Entropy(budget=67, sinks=4, recent=64), "at least budget=68"),
        (lambda: KVCache(eviction=Window), "Window without brackets"),
        (lambda: KVCache(eviction="window"), "got 'window'"),
        (lambda: KVCache(eviction={"windows": {}}), "names one policy"),
        (lambda: KVCache(eviction={"window": {"size": 3}}), "Window has no size; it has sinks, recent"),
        (lambda: KVCache(eviction=Window(), reuse_prefix=True), "choose eviction or reuse_prefix"),
        (lambda: KVCache(eviction=Unscored()), "scores of Unscored must be one of None, 'mass', 'entropy'; got 'age'"),
    ):
        with pytest.raises(PlanError, match=what):
            make()


def test_a_config_file_keeps_the_policy():
    config = OptimizeConfig((Attention(), KVCache(eviction=TopAttention(budget=256))))
    options = config.to_dict()
    assert options["kv_cache"]["eviction"] == {"top_attention": {"budget": 256, "sinks": 4, "recent": 64}}
    assert OptimizeConfig.from_dict(options) == config
    assert KVCache(eviction=Window()).lossy and not KVCache().lossy


def test_what_cannot_evict_says_so():
    stock = tiny_model("llama")
    with pytest.raises(PlanError, match="optimize the model first"):
        paged_cache(stock, eviction=Window())
    with pytest.raises(AccelError, match="attention pass"):
        optimize(stock, [KVCache(eviction=Window())])
    sliding = tiny_model("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=0)
    config = OptimizeConfig((Attention(), KVCache(eviction=Window())), allow_skips=True)
    assert "forget by themselves" in str(plan(sliding, config))
    assert "eviction" not in report(optimize(sliding, config)).cache


def test_division_by_reach():
    """A layer that looks far gets more; the sum is the budget; near mass behind a gap counts as far as the gap."""
    near, far, gap = [8.0] + [0.0] * 7, [1.0] * 8, [1.0, 0, 0, 0, 0.5, 0, 0, 0]
    assert divide_by_reach(torch.tensor([near, far]), 64, 16, 1) == [16, 112]
    assert divide_by_reach(torch.tensor([near, gap]), 48, 16, 1) == [16, 80]
    assert divide_by_reach(torch.tensor([near, far]), 64, 16, 33) == [48, 80]
    assert sum(divide_by_reach(torch.rand(5, 40), 200, 16, 20)) == 5 * 200 // 16 * 16
    # room for everything, or for no more than the least: all get the same
    assert divide_by_reach(torch.tensor([near, far]), 128, 16, 1) == [128, 128]
    assert divide_by_reach(torch.tensor([near, far]), 32, 16, 30) == [32, 32]


def test_profile_by_distance():
    mass, ages = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]), torch.tensor([[40, 20, 0], [41, 21, 1]])
    assert reach_profile(mass, ages, 16, 3).tolist() == pytest.approx([0.95, 0.45, 0.6])
    assert reach_profile(mass, ages, 16, 2).tolist() == pytest.approx([0.95, 1.05])


# What is held


@two_families
@all_policies
def test_the_budget_bounds_the_memory(models, family, policy):
    model = models[family]
    cache, ids = paged_cache(model, PAGE, eviction=policy), prompt(2, 130)
    full = paged_cache(model, PAGE)
    for chunk in ids[:, :120].split(40, 1):
        feed(model, cache, chunk)
        feed(model, full, chunk)
        assert sum(cache.tokens_held) <= 3 * policy.budget
        assert cache.length == full.length
    assert cache.bytes_reserved() <= 3 * 2 * 5 * PAGE * full.bytes_held() / (3 * 2 * 8 * PAGE)  # a chunk above it
    one_by_one(model, cache, ids[:, 120:])
    pages = sum(-(-held // PAGE) for held in cache.tokens_held) * 2
    assert cache.pages_in_use == pages <= 3 * 2 * 2
    assert sum(cache.tokens_held) <= 3 * policy.budget and cache.length == 130
    for layer in tokens_of(cache):
        for row in layer:
            assert row[:2] == [0, 1] and row[-6:] == list(range(124, 130)) and len(set(row)) == len(row)


@two_families
@all_policies
def test_generate_that_goes_on_with_its_cache(models, family, policy):
    """The second call brings one token that the full cache does not hold. It takes another one's place, anywhere."""
    model, ids = models[family], prompt(2, 60)
    options = dict(do_sample=False, pad_token_id=0, eos_token_id=None)

    def go_on(ids, cache, new):
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **options, **{CACHE: cache})

    caches = [paged_cache(model, PAGE, eviction=policy) for _ in range(2)]
    whole = go_on(ids, caches[0], 20)
    parts = go_on(go_on(ids, caches[1], 5), caches[1], 15)
    assert torch.equal(parts, whole) and tokens_of(caches[0]) == tokens_of(caches[1])


def test_a_prompt_is_cut_evenly(models, monkeypatch):
    """No rest of one token, which would watch alone what the budget is divided by."""
    model, cuts = models["llama"], []
    monkeypatch.setattr(decode, "EVICTING_PIECE", 32)
    run = decode.prefill
    monkeypatch.setattr(decode, "prefill", lambda *args: cuts.append(args[1].shape[1]) or run(*args))
    cache = paged_cache(model, PAGE, eviction=TopAttention(20, 2, 6))
    model.generate(prompt(1, 65), max_new_tokens=2, do_sample=False, pad_token_id=0, **{CACHE: cache})
    assert cuts == [22, 22, 21]
    # 4 pages: the whole memory for the first piece, then what the budget leaves of it
    cuts.clear()
    monkeypatch.setattr(decode, "EVICTING_PIECE", 4096)
    cache = paged_cache(model, PAGE, max_pages=4, eviction=Window(2, 18))
    model.generate(prompt(1, 150), max_new_tokens=20, do_sample=False, pad_token_id=0, **{CACHE: cache})
    assert cuts == [50, 34, 33, 33] and cache.tokens_held == [20] * 3
    with pytest.raises(CacheFullError):
        model.generate(prompt(4, 150), max_new_tokens=2, do_sample=False, pad_token_id=0, **{CACHE: paged_cache(
            model, PAGE, max_pages=4, eviction=Window(2, 18))})  # fmt: skip


@two_families
@all_policies
def test_nothing_changes_before_the_budget_is_full(models, family, policy):
    model, ids = models[family], prompt(2, 20)
    cache, full = paged_cache(model, PAGE, eviction=policy), paged_cache(model, PAGE)
    expected = torch.cat((feed(model, full, ids[:, :9]), one_by_one(model, full, ids[:, 9:])), 1)
    actual = torch.cat((feed(model, cache, ids[:, :9]), one_by_one(model, cache, ids[:, 9:])), 1)
    assert relative_error(actual, expected) < 1e-5 and cache.tokens_held == [20] * 3


@two_families
def test_the_least_attended_goes(models, family):
    """The token that is replaced is the one of the lowest score, among those that may go, in each row and layer."""
    model, ids = models[family], prompt(3, 32)
    cache = paged_cache(model, PAGE, eviction=TopAttention(32, 2, 6))
    feed(model, cache, ids)
    before = [(kept.scores[:, :32].clone(), kept.positions[:, :32].clone()) for kept in cache.kept]
    assert all((scores.sum(1) > 1).all() for scores, _ in before)
    feed(model, cache, ids[:, :1])
    for kept, (scores, positions) in zip(cache.kept, before, strict=True):
        newest = 32 + 1 - kept.policy.protected(32)
        for row in range(3):
            may_go = [(scores[row, i].item(), i) for i in range(32) if 2 <= positions[row, i] < newest]
            assert len(may_go) == 3 and kept.positions[row, min(may_go)[1]] == 32


@all_policies
def test_generation_is_the_same_on_every_path(models, policy):
    """Our loop with its fused prefill, and the model called step by step; rows of different lengths too."""
    for family, model in models.items():
        ids, mask = prompt(2, 70), torch.ones(2, 70, dtype=torch.long)
        mask[1, :33] = 0
        cache = paged_cache(model, PAGE, eviction=policy)
        options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
        tokens = model.generate(ids, **options, **{CACHE: cache})[:, 70:]
        assert cache.length == 81
        other = paged_cache(model, PAGE, eviction=policy)
        places = (mask.cumsum(1) - 1).clamp_min(0)
        step = feed(model, other, ids, attention_mask=mask, position_ids=places)[:, -1:].argmax(-1)
        taken = [step]
        for i in range(11):
            mask = torch.cat((mask, mask[:, :1] | 1), 1)
            place = places[:, -1:] + i + 1
            step = feed(model, other, step, attention_mask=mask, position_ids=place)[:, -1:].argmax(-1)
            taken.append(step)
        assert torch.equal(torch.cat(taken, 1), tokens), family
        # padding goes before any token
        assert all(row[0] >= 33 for layer in tokens_of(cache) for row in layer[1:]), family


def test_a_padded_row_is_what_it_is_alone(models):
    model = models["deepseek_v3"]
    ids, mask = prompt(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, :25] = 0
    options = dict(max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=None)
    both = model.generate(
        ids, attention_mask=mask, **options, **{CACHE: paged_cache(model, PAGE, eviction=Window(2, 18))}
    )
    alone = model.generate(ids[1:, 25:], **options, **{CACHE: paged_cache(model, PAGE, eviction=Window(2, 18))})
    assert torch.equal(both[1, 60:], alone[0, 35:])


def test_optimize_with_a_policy(models):
    model = tiny_model("deepseek_v3")
    passes = {name: {} for name in PASSES}
    passes |= {"kv_cache": {"page_size": PAGE, "eviction": {"window": {"sinks": 2, "recent": 18}}}, "allow_skips": True}
    optimize(model, passes)
    out = model.generate(
        prompt(1, 50), max_new_tokens=30, do_sample=False, pad_token_id=0, eos_token_id=None,
        return_dict_in_generate=True,
    )  # fmt: skip
    cache = out[CACHE]
    assert cache.policy == Window(2, 18) and cache.tokens_held == [20] * 3
    assert "Window(sinks=2, recent=18)" in str(report(model))
    beams = model.generate(prompt(1, 50), max_new_tokens=8, num_beams=3, do_sample=False, pad_token_id=0)
    assert beams.shape[1] > 50


# Changing a cache


@two_families
def test_rows_that_are_reordered_go_on_by_themselves(models, family):
    model, ids, policy = models[family], prompt(3, 40), TopAttention(20, 2, 6)
    cache, order = paged_cache(model, PAGE, eviction=policy), torch.tensor([2, 0, 0])
    feed(model, cache, ids)
    cache.reorder_cache(order)
    fresh = paged_cache(model, PAGE, eviction=policy)
    feed(model, fresh, ids[order])
    after = prompt(3, 6, seed=5)
    assert relative_error(one_by_one(model, cache, after), one_by_one(model, fresh, after)) < 1e-5
    assert tokens_of(cache) == tokens_of(fresh)
    cache.batch_select_indices(torch.tensor([1]))
    other = copy.deepcopy(cache)
    assert relative_error(one_by_one(model, cache, after[1:2]), one_by_one(model, other, after[1:2])) == 0


@two_families
@all_policies
def test_tokens_that_are_taken_back(models, family, policy):
    """A few tokens at once may be guesses: with them nothing is forgotten until the next call."""
    model, ids = models[family], prompt(2, 60)
    cache, straight = (paged_cache(model, PAGE, eviction=policy) for _ in range(2))
    for each in (cache, straight):
        feed(model, each, ids[:, :50])
    state = tokens_of(cache)
    feed(model, cache, prompt(2, 7, seed=3))
    cache.crop(-7)
    assert tokens_of(cache) == state and cache.length == 50
    if isinstance(policy, Window):  # the others have watched the guesses
        assert relative_error(one_by_one(model, cache, ids[:, 50:]), one_by_one(model, straight, ids[:, 50:])) < 1e-5
        cache.crop(-18)  # as far as tokens are held
        with pytest.raises(RuntimeError, match="take back fewer"):
            cache.crop(-30)


def test_recording_keeps_everything_until_the_crop(models):
    model, ids = models["llama"], prompt(1, 60)
    cache = paged_cache(model, PAGE, eviction=Window(2, 18))
    cache.activate_past_recording()
    feed(model, cache, ids[:, :50])
    one_by_one(model, cache, ids[:, 50:])
    assert cache.tokens_held == [60] * 3
    cache.crop(-20)
    assert cache.length == 40 and cache.tokens_held == [20] * 3
    assert tokens_of(cache)[0] == [[0, 1, *range(22, 40)]]


def test_an_attention_that_knows_of_no_eviction():
    model, ids = optimize(tiny_model("llama"), {"attention": {}, "kv_cache": {}}), prompt(1, 60)
    cache = paged_cache(model, PAGE, eviction=Window(2, 18))
    with pytest.raises(ValueError, match="holds nothing"):
        cache.budgets()
    feed(model, cache, ids)
    state = tokens_of(cache)
    with pytest.raises(RuntimeError, match="unpickled"):
        feed(model, pickle.loads(pickle.dumps(cache)), ids[:, :3])
    restore(model)
    with pytest.raises(RuntimeError, match="was restored"):
        feed(model, cache, ids[:, :3])
    assert tokens_of(cache) == state and cache.length == 60


class Uneven(Window):
    def divide(self, profiles, page_size, num_layers):
        return [16, 60, 16]


def test_a_layer_without_room_for_copies_stops_all(models):
    """Rows that share pages need pages of their own: layer 0 would find them, layer 1 does not."""
    model, ids = models["llama"], prompt(1, 60)
    cache = paged_cache(model, PAGE, max_pages=6, eviction=Uneven(2, 14))
    feed(model, cache, ids)
    cache.settle()
    cache.batch_repeat_interleave(2)
    state = tokens_of(cache)
    with pytest.raises(CacheFullError, match="need 8 pages"):
        feed(model, cache, ids[:, :1].expand(2, 1))
    assert tokens_of(cache) == state and [layer.length for layer in cache.layers] == [60] * 3


def test_pages_are_reserved_as_far_as_they_go(models):
    """A graph asks for pages ahead of what it needs; where max_pages has fewer, for what it needs."""
    model, ids = models["llama"], prompt(1, 40)
    cache = paged_cache(model, PAGE, max_pages=4, eviction=Window(2, 98))
    feed(model, cache, ids)
    assert cache.reserve(48, 8) == 56 and cache.reserve(64, 64) == 64
    with pytest.raises(CacheFullError):
        cache.reserve(65, 64)


def test_reset_and_a_failed_call(models):
    model, ids = models["llama"], prompt(2, 64)
    cache = paged_cache(model, PAGE, max_pages=6, eviction=Window(2, 18))
    feed(model, cache, ids[:, :40])
    state = tokens_of(cache)
    with pytest.raises(CacheFullError):
        feed(model, cache, ids)
    assert tokens_of(cache) == state and cache.length == 40
    storage = weakref.ref(cache.layers[0].pool.storages[0])
    cache.reset()
    assert cache.pages_in_use == 0 and cache.length == 0 and storage() is None
    feed(model, cache, ids[:1, :40])
    assert cache.tokens_held == [20] * 3


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
@two_families
def test_fp8_pages(models, family, dtype):
    model, ids = models[family], prompt(2, 60)
    cache = paged_cache(model, PAGE, dtype=dtype, eviction=TopAttention(20, 2, 6))
    whole = paged_cache(model, PAGE, dtype=dtype)
    for each in (cache, whole):
        feed(model, each, ids[:, :50])
    for kept, layer, full in zip(cache.kept, cache.layers, whole.layers, strict=True):
        # what stays has been moved byte by byte
        index = kept.positions[:, None, : kept.held, None].long().expand(-1, full.keys.shape[1], -1, full.keys.shape[3])
        assert torch.equal(layer.keys, full.keys.gather(2, index))
    assert one_by_one(model, cache, ids[:, 50:]).isfinite().all()
    assert sum(cache.tokens_held) <= 60 and cache.bytes_held() < whole.bytes_held()
