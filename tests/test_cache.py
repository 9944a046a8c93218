"""The paged cache against the cache of transformers, and the page table against a plain list of tokens."""

import copy
import functools
import pickle

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import DynamicCache

from deepseek_accel import CacheFullError, OptimizeConfig, PlanError, UnsupportedModelError, optimize
from deepseek_accel.cache import PageTable, paged_cache
from deepseek_accel.passes.attention import Attention
from deepseek_accel.passes.kv_cache import KVCache
from deepseek_accel.testing import tiny_model
from deepseek_accel.versions import cache_argument, crop_takes_length

PAGE = 16
KINDS = {
    "mla": ("deepseek_v3", {}),
    "gqa": ("llama", {}),
    "window": ("qwen2", dict(sliding_window=20, use_sliding_window=True, max_window_layers=0)),
    "mixed": ("qwen2", dict(sliding_window=20, use_sliding_window=True, max_window_layers=1)),
}
FULL = ("mla", "gqa")
WINDOWED = ("window", "mixed")


@functools.cache
def model_of(kind):
    model_type, options = KINDS[kind]
    return tiny_model(model_type, **options)


def shapes(kind):
    """(heads, key_dim), (heads, value_dim)."""
    return ((1, 32), (1, 8)) if kind == "mla" else ((2, 16), (2, 16))


class Pair:
    """The same calls to a paged cache and to the library's; `same` compares what can be read."""

    def __init__(self, kind, rows=2, seed=0, **options):
        self.kind, self.rows, self.length = kind, rows, 0
        self.ours = paged_cache(model_of(kind), PAGE, **options)
        self.theirs = DynamicCache(config=model_of(kind).config)
        self.generator = torch.Generator().manual_seed(seed)

    def fresh(self, count, rows=None):
        return [
            torch.randn(self.rows if rows is None else rows, heads, count, dim, generator=self.generator)
            for heads, dim in shapes(self.kind)
        ]

    def update(self, count):
        for layer in range(3):
            keys, values = self.fresh(count)
            ours, theirs = self.ours.update(keys, values, layer), self.theirs.update(keys, values, layer)
            visible = self.visible(layer, count)
            for mine, other in zip(ours, theirs, strict=True):
                assert mine.dtype == other.dtype
                assert torch.equal(mine[:, :, -visible:], other[:, :, -visible:])
        self.length += count

    def visible(self, layer, count):
        """How many of the last keys some query of a step of `count` tokens sees."""
        window = self.ours.layers[layer].window
        everything = self.length + count
        return everything if window is None else min(everything, window - 1 + count)

    def both(self, call):
        call(self.ours), call(self.theirs)

    def crop(self, count):
        self.both(lambda cache: cache.crop(-count))
        self.length = max(0, self.length - count)

    def select(self, indices):
        self.both(lambda cache: cache.batch_select_indices(torch.tensor(indices)))
        self.rows = len(indices)

    def same(self):
        assert self.ours.get_seq_length() == self.length
        for layer in range(3):
            mine, other = self.ours.layers[layer], self.theirs.layers[layer]
            assert self.ours.get_seq_length(layer) == self.length
            assert mine.is_sliding == other.is_sliding
            assert self.ours.get_max_length(layer) == self.theirs.get_max_length(layer)
            for query in (1, 5):
                length, offset = self.ours.get_mask_sizes(query, layer)
                assert length + offset == self.length + query
                if mine.window is None or not self.length:
                    assert (length, offset) == self.theirs.get_mask_sizes(query, layer)
                else:
                    assert offset <= max(0, self.length - mine.window + 1), "a visible key is missing"
            if self.length:
                keep = self.visible(layer, 0)
                for name in ("keys", "values"):
                    read, expected = getattr(mine, name), getattr(other, name)
                    assert torch.equal(read[:, :, -keep:], expected[:, :, -keep:]) if keep else True
                    assert read.shape[0] == self.rows


@pytest.mark.parametrize("kind", KINDS)
def test_updates(kind):
    pair = Pair(kind)
    pair.same()
    for count in (23, 1, 1, 9, 16, 15, 1, 2, 40, 1):
        pair.update(count)
        pair.same()


@pytest.mark.parametrize("kind", KINDS)
def test_one_row(kind):
    """One row in consecutive pages is read as a view; then it is not, and must be the same."""
    pair = Pair(kind, rows=1)
    pair.update(40)
    pair.same()
    pair.both(lambda cache: cache.batch_repeat_interleave(2))
    pair.rows = 2
    pair.update(20)
    pair.select([1])
    pair.same()
    pair.update(20)
    pair.same()


@pytest.mark.parametrize("kind", KINDS)
def test_reorder_repeat_select(kind):
    pair = Pair(kind, rows=3)
    pair.both(lambda cache: cache.reorder_cache(torch.tensor([2, 1, 0])))
    pair.both(lambda cache: cache.batch_repeat_interleave(2))
    pair.both(lambda cache: cache.batch_select_indices(torch.tensor([0])))
    pair.update(23)
    for beams in ([2, 0, 0], [1, 1, 1], [0, 1, 2], [2, 1, 0]):
        pair.both(lambda cache, beams=beams: cache.reorder_cache(torch.tensor(beams)))
        pair.same()
        pair.update(5)
        pair.same()
    pair.both(lambda cache: cache.batch_repeat_interleave(2))
    pair.rows = 6
    pair.same()
    pair.update(3)
    pair.same()
    pair.select([5, 0, 0, 3])
    pair.same()
    pair.update(30)
    pair.both(lambda cache: cache.batch_select_indices(torch.tensor([True, False, False, True])))
    pair.rows = 2
    pair.same()
    pair.update(1)
    pair.same()


@pytest.mark.parametrize("indices", [[0, 2], slice(1, None), torch.tensor([-1, 0])], ids=str)
def test_whatever_indexes_rows(indices):
    pair = Pair("gqa", rows=3)
    pair.update(20)
    pair.both(lambda cache: cache.batch_select_indices(indices))
    pair.rows = 2
    pair.same()


@pytest.mark.parametrize("kind", FULL)
def test_crop(kind):
    pair = Pair(kind)
    pair.ours.crop(-3)  # the library's raises here up to 5.15
    pair.same()
    pair.update(40)
    for count in (0, 1, 7, 16, 0):
        pair.crop(count)
        pair.same()
    pair.update(20)
    pair.same()
    pair.crop(pair.length)
    pair.same()
    for mine, other in zip(pair.ours.layers, pair.theirs.layers, strict=True):
        assert mine.keys.shape == other.keys.shape
        assert mine.values.shape == other.values.shape
    pair.update(9)
    pair.crop(1000)
    pair.same()
    pair.update(17)
    pair.same()


@pytest.mark.parametrize("kind", FULL)
def test_crop_by_a_tensor(kind):
    """Assisted decoding of 5.15 counts in tensors; a length that is one would change under whoever remembers it."""
    pair = Pair(kind, rows=1)
    pair.update(20)
    for cache in (pair.ours, pair.theirs):
        cache.crop(torch.tensor(-3))
    pair.length -= 3
    assert all(type(layer.get_seq_length()) is int for layer in pair.ours.layers)
    pair.update(4)
    pair.same()


def test_crop_to_a_length_follows_the_library():
    pair = Pair("gqa")
    pair.update(40)
    if crop_takes_length():
        for length in (100, 40, 17):
            pair.both(lambda cache, length=length: cache.crop(length))
            pair.length = min(pair.length, length)
            pair.same()
    else:
        for cache in (pair.ours, pair.theirs, pair.ours.layers[0], pair.theirs.layers[0]):
            with pytest.raises(ValueError, match="negative"):
                cache.crop(17)
        pair.same()


@pytest.mark.parametrize("kind", WINDOWED)
def test_crop_with_a_window(kind):
    """Tokens that left the window come back if recording was on before they left."""
    pair = Pair(kind)
    pair.update(45)
    pair.both(lambda cache: cache.activate_past_recording())
    for written, removed in ((7, 7), (30, 20), (5, 0), (21, 21), (1, 1), (64, 63)):
        pair.update(written)
        pair.crop(removed)
        pair.same()
    pair.update(1)
    pair.same()


@pytest.mark.parametrize("kind", WINDOWED)
def test_recording_over_several_updates(kind):
    pair = Pair(kind)
    pair.both(lambda cache: cache.activate_past_recording())
    for _ in range(30):
        pair.update(2)
    pair.crop(59)
    pair.same()
    pair.update(10)
    pair.same()


@pytest.mark.parametrize("kind", WINDOWED)
def test_crop_into_what_is_gone(kind):
    """Raises as the library's cache does, and changes nothing."""
    pair = Pair(kind)
    pair.update(45)
    pair.update(45)
    before = [t for layer in pair.ours.layers for t in (layer.keys, layer.values)]
    for cache in (pair.ours, pair.theirs):
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-60)
    assert [layer.get_seq_length() for layer in pair.ours.layers] == [90] * 3
    after = [t for layer in pair.ours.layers for t in (layer.keys, layer.values)]
    assert all(torch.equal(x, y) for x, y in zip(after, before, strict=True))


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_window_gives_pages_back(kind):
    pair = Pair(kind, rows=1)
    for _ in range(200):
        pair.update(1)
    pair.same()
    windowed = -(-20 // PAGE) + 1
    full = -(-200 // PAGE) if kind == "mixed" else 0
    assert pair.ours.pages_in_use <= windowed + full
    assert pair.ours.bytes_reserved() < 3 * 2 * 16 * 2 * 4 * PAGE * (windowed + full) * 2


@pytest.mark.parametrize("kind", KINDS)
def test_reset(kind):
    pair = Pair(kind, rows=3)
    pair.update(40)
    pair.both(lambda cache: cache.reset())
    pair.length, pair.rows = 0, 2
    if pair.theirs.layers[0].get_seq_length() or pair.theirs.layers[0].is_initialized:
        pair.theirs = DynamicCache(config=model_of(kind).config)  # up to 5.15 the library's reset zeroes and keeps rows
    pair.same()
    assert pair.ours.pages_in_use == 0
    pair.update(20)
    pair.same()
    pair.update(1)
    pair.same()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_copies_stand_alone(kind, copied):
    pair = Pair(kind)
    twin = Pair(kind, seed=1)
    twin.ours, twin.theirs = copied(twin.ours), copied(twin.theirs)
    pair.update(23)
    pair.both(lambda cache: cache.reorder_cache(torch.tensor([1, 1])))
    other = Pair(kind, seed=3)
    other.ours, other.theirs, other.length = copied(pair.ours), copied(pair.theirs), pair.length
    other.same()
    for _ in range(3):
        pair.update(7)
        other.update(5)
        other.both(lambda cache: cache.reorder_cache(torch.tensor([1, 0])))
        pair.same()
        other.same()
    twin.update(3)
    twin.same()


def test_copies_of_a_cache_that_serves_an_optimized_model():
    """A deep copy reads pages like the original; a pickled one gathers, and both work with the model."""
    model = optimize(tiny_model("deepseek_v3"), OptimizeConfig((Attention(), KVCache(page_size=16))))
    ids = torch.randint(2, 128, (2, 23))
    cache = paged_cache(model, 16)
    with torch.no_grad():
        model(ids, **{cache_argument(): cache})
        copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
        expected = model(ids[:, :1], **{cache_argument(): cache}).logits
        for twin in copies:
            got = model(ids[:, :1], **{cache_argument(): twin}).logits
            assert (got - expected).abs().max() < 1e-4
            assert twin.get_seq_length() == 24
    assert hasattr(copies[0].layers[0].update(*Pair("mla").fresh(1))[0], "pool")
    assert isinstance(copies[1].layers[0].update(*Pair("mla").fresh(1))[0], torch.Tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_growth(kind):
    """Memory grows by half at least, never beyond need by more, and content survives."""
    pair = Pair(kind)
    reserved = []
    for _ in range(60):
        pair.update(3)
        reserved.append(pair.ours.bytes_reserved())
        assert pair.ours.bytes_held() <= pair.ours.bytes_reserved()
    pair.same()
    assert len(set(reserved)) < 20
    assert pair.ours.bytes_reserved() <= 1.6 * max(pair.ours.bytes_held(), 3 * 2 * 3 * PAGE * 256)


def test_reserved_tokens_are_not_grown_into():
    pair = Pair("gqa", reserve_tokens=100)
    pair.update(1)
    reserved = pair.ours.bytes_reserved()
    pages = [layer.pool.storages[i] for i, layer in enumerate(pair.ours.layers)]
    for _ in range(99):
        pair.update(1)
    assert pair.ours.bytes_reserved() == reserved
    assert all(layer.pool.storages[i] is pages[i] for i, layer in enumerate(pair.ours.layers))
    pair.same()
    pair.update(30)
    assert pair.ours.bytes_reserved() > reserved
    pair.same()


def test_bytes_are_counted():
    pair = Pair("gqa")
    assert pair.ours.pages_in_use == pair.ours.bytes_held() == pair.ours.bytes_reserved() == 0
    pair.update(17)
    assert pair.ours.pages_in_use == 4  # two rows of two pages, for all layers at once
    assert pair.ours.bytes_held() == 4 * PAGE * (2 * 16 + 2 * 16) * 4 * 3
    pair.both(lambda cache: cache.reorder_cache(torch.tensor([0, 0])))
    assert pair.ours.pages_in_use == 2
    pair.update(1)
    assert pair.ours.pages_in_use == 3  # the full page stays shared, the written one does not
    pair.crop(2)
    assert pair.ours.pages_in_use == 1


def snapshot(cache):
    tables = [(copy.deepcopy(pool.table.rows), pool.table.dropped, pool.table.high_water) for pool in cache._pools.all]
    content = [t.clone() for layer in cache.layers if layer.is_initialized for t in (layer.keys, layer.values)]
    state = [(layer.length, layer.is_initialized) for layer in cache.layers]
    return tables, content, (state, cache.bytes_held(), cache.bytes_reserved())


def assert_unchanged(cache, before):
    after = snapshot(cache)
    assert after[2] == before[2]
    assert after[0] == before[0]
    assert all(torch.equal(x, y) for x, y in zip(after[1], before[1], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_cache_is_unchanged(kind):
    pair = Pair(kind, max_pages=6)
    pair.update(47)
    before = snapshot(pair.ours)
    with pytest.raises(CacheFullError, match="max_pages is 6"):
        pair.ours.update(*pair.fresh(50), 0)
    assert_unchanged(pair.ours, before)
    pair.update(1)
    pair.same()
    if kind in FULL:
        with pytest.raises(CacheFullError):
            pair.ours.update(*pair.fresh(1), 0)
        pair.crop(1)
        pair.update(1)
        pair.same()


@pytest.mark.parametrize("kind", FULL)
def test_copies_on_write_count_as_pages(kind):
    """Sharing fits, writing does not: the row that writes needs a page of its own."""
    pair = Pair(kind, rows=1, max_pages=3)
    pair.update(20)
    pair.both(lambda cache: cache.batch_repeat_interleave(3))
    pair.rows = 3
    before = snapshot(pair.ours)
    with pytest.raises(CacheFullError):
        pair.ours.update(*pair.fresh(1), 0)
    assert_unchanged(pair.ours, before)
    pair.select([0, 1])
    pair.update(1)
    pair.same()


@pytest.mark.parametrize("kind", KINDS)
def test_full_at_the_first_update(kind):
    """A prompt that does not fit leaves the cache as new: fewer rows fit afterwards."""
    pair = Pair(kind, rows=4, max_pages=6)
    before = snapshot(pair.ours)
    with pytest.raises(CacheFullError):
        pair.ours.update(*pair.fresh(50), 0)
    assert_unchanged(pair.ours, before)
    pair.rows = 1
    pair.update(50)
    pair.same()


@pytest.mark.parametrize("kind", WINDOWED)
def test_full_with_a_window_keeps_what_a_crop_needs(kind):
    """A step that does not fit must not have dropped the pages a crop before it could still use."""
    pair = Pair(kind, rows=1, max_pages=8)
    pair.update(35)
    # from token 35 on nothing sees page 0, but from token 33 on something does
    before = snapshot(pair.ours)
    with pytest.raises(CacheFullError):
        pair.ours.update(*pair.fresh(200), 0)
    assert_unchanged(pair.ours, before)
    pair.ours.crop(-2)
    assert pair.ours.get_seq_length() == 33


def test_a_wrong_number_of_rows_changes_nothing():
    pair = Pair("gqa")
    pair.update(20)
    before = snapshot(pair.ours)
    with pytest.raises(ValueError, match="holds 2 sequences, the new keys are of 3"):
        pair.ours.update(*pair.fresh(1, rows=3), 0)
    assert_unchanged(pair.ours, before)
    pair.update(1)
    pair.same()


def test_a_wrong_number_of_rows_in_a_layer_that_is_empty():
    pair = Pair("gqa")
    keys, values = pair.fresh(5)
    pair.ours.update(keys, values, 0)
    with pytest.raises(ValueError, match="2 sequences"):
        pair.ours.update(*pair.fresh(5, rows=3), 1)
    assert not pair.ours.layers[1].is_initialized
    pair.ours.update(keys, values, 1)
    assert torch.equal(pair.ours.layers[1].keys, keys)


@pytest.mark.parametrize("kind", KINDS)
def test_layer_level_methods(kind):
    """Called on every layer in turn, as code that walks `cache.layers` does."""
    pair = Pair(kind, rows=2)
    pair.both(lambda cache: cache.activate_past_recording())
    pair.update(23)

    def each(name, *arguments):
        pair.both(lambda cache: [getattr(layer, name)(*arguments) for layer in cache.layers])

    each("reorder_cache", torch.tensor([1, 0]))
    pair.same()
    pair.update(4)
    each("batch_repeat_interleave", 2)
    pair.rows = 4
    pair.update(4)
    pair.same()
    each("batch_select_indices", torch.tensor([3, 0, 1]))
    pair.rows = 3
    pair.same()
    pair.update(30)
    each("crop", -25)
    pair.length -= 25
    pair.same()
    pair.update(9)
    pair.same()


@pytest.mark.parametrize("kind", FULL)
def test_one_layer_leaves_the_others(kind):
    """A method of one layer must not reach the layers that share its pages."""
    pair = Pair(kind, rows=2)
    pair.update(23)
    for cache in (pair.ours, pair.theirs):
        cache.layers[1].reorder_cache(torch.tensor([1, 0]))
    pair.same()
    pair.update(1)
    pair.same()
    pair.both(lambda cache: cache.reorder_cache(torch.tensor([0, 0])))
    pair.update(1)
    pair.same()
    for cache in (pair.ours, pair.theirs):
        cache.layers[2].crop(-3)
    assert [layer.get_seq_length() for layer in pair.ours.layers] == [25, 25, 22]
    for mine, other in zip(pair.ours.layers, pair.theirs.layers, strict=True):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)


@pytest.mark.parametrize("kind", KINDS)
def test_reset_of_every_layer(kind):
    """`layer.reset()` on each layer is `cache.reset()`: another batch size fits, and no page stays behind."""
    pair = Pair(kind, rows=3)
    pair.update(40)
    for layer in pair.ours.layers:
        layer.reset()
    pair.theirs = DynamicCache(config=model_of(kind).config)
    pair.length, pair.rows = 0, 2
    assert pair.ours.get_seq_length() == 0
    assert pair.ours.pages_in_use == 0
    pair.update(20)
    pair.same()
    pair.update(1)
    pair.same()


def test_reset_of_one_layer():
    pair = Pair("gqa", rows=2)
    pair.update(20)
    kept = pair.ours.layers[1].keys.clone()
    pair.ours.layers[0].reset()
    assert [layer.get_seq_length() for layer in pair.ours.layers] == [0, 20, 20]
    assert torch.equal(pair.ours.layers[1].keys, kept)
    keys, values = pair.fresh(7)
    pair.ours.update(keys, values, 0)
    assert torch.equal(pair.ours.layers[0].keys, keys)
    assert torch.equal(pair.ours.layers[1].keys, kept)


def test_an_update_of_no_tokens():
    pair = Pair("gqa")
    pair.update(0)
    pair.update(20)
    pair.update(0)
    pair.same()


def test_gradients_reach_the_tokens_of_this_call_only():
    pair = Pair("gqa")
    pair.update(5)
    keys, values = (t.requires_grad_() for t in pair.fresh(3))
    read, _ = pair.ours.layers[0].update(keys, values)
    assert not read.requires_grad
    other = Pair("gqa")
    keys, values = (t.requires_grad_() for t in other.fresh(3))
    read, _ = other.ours.layers[0].update(keys, values)
    read.sum().backward()
    assert torch.equal(keys.grad, torch.ones_like(keys))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_kept_bit_by_bit(dtype):
    pair = Pair("mla")
    fresh = pair.fresh
    pair.fresh = lambda count, rows=None: [t.to(dtype) for t in fresh(count, rows)]
    for count in (20, 1, 30):
        pair.update(count)
    pair.same()
    assert pair.ours.layers[0].keys.dtype == dtype


def test_what_generation_asks_of_a_cache():
    cache = paged_cache(model_of("gqa"))
    assert len(cache) == 3
    assert not cache.is_compileable
    assert cache.is_sliding == [False] * 3
    assert paged_cache(model_of("mixed")).is_sliding == [False, True, True]
    assert cache.get_seq_length(99) == 0
    assert getattr(cache, "is_croppable", True)
    assert "tokens=0" in repr(cache)
    assert cache.layers[0].keys is None
    assert cache.layers[0].values is None


def test_pages_met_by_a_stock_attention_say_what_to_do():
    model = optimize(tiny_model("llama"), OptimizeConfig((Attention(), KVCache())))
    cache = paged_cache(model)
    keys, _ = cache.update(*Pair("gqa").fresh(3), 0)
    with pytest.raises(AttributeError, match=r"paged_cache\(model\)"):
        keys.transpose(1, 2)


def test_bad_options():
    for size in (0, 8, 24, 16.0, True, "64"):
        with pytest.raises(PlanError, match="page_size"):
            paged_cache(model_of("gqa"), size)
    for pages in (0, -1, 1.5, True):
        with pytest.raises(PlanError, match="max_pages"):
            paged_cache(model_of("gqa"), 16, pages)
    for tokens in (-1, 2.0):
        with pytest.raises(PlanError, match="reserve_tokens"):
            paged_cache(model_of("gqa"), reserve_tokens=tokens)


def test_a_model_whose_cache_holds_more():
    with pytest.raises(UnsupportedModelError, match="indexer"):
        paged_cache(tiny_model("deepseek_v32"))


FAST = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class CacheMachine(RuleBasedStateMachine):
    """Any order of calls: what can be read equals the library's cache."""

    @initialize(kind=st.sampled_from(sorted(KINDS)), rows=st.integers(1, 3), record=st.booleans())
    def begin(self, kind, rows, record):
        self.pair = Pair(kind, rows)
        self.record = record or kind in FULL
        if record:
            self.pair.both(lambda cache: cache.activate_past_recording())

    @rule(count=st.integers(1, 40))
    def update(self, count):
        self.pair.update(count)

    @rule(data=st.data())
    def reorder(self, data):
        beams = data.draw(
            st.lists(st.integers(0, self.pair.rows - 1), min_size=self.pair.rows, max_size=self.pair.rows)
        )
        self.pair.both(lambda cache: cache.reorder_cache(torch.tensor(beams)))

    @precondition(lambda self: self.pair.length and self.pair.rows <= 3)
    @rule(repeats=st.integers(1, 2))
    def repeat(self, repeats):
        self.pair.both(lambda cache: cache.batch_repeat_interleave(repeats))
        self.pair.rows *= repeats

    @precondition(lambda self: self.pair.length)
    @rule(data=st.data())
    def select(self, data):
        self.pair.select(data.draw(st.lists(st.integers(0, self.pair.rows - 1), min_size=1, max_size=4)))

    # the library's window layer keeps too little when all its tokens are taken back, so one always stays
    @precondition(lambda self: self.record and self.pair.length > 1)
    @rule(data=st.data())
    def crop(self, data):
        windowed = any(layer.window is not None for layer in self.pair.ours.layers)
        limit = self.pair.length if not windowed else self.recorded()
        self.pair.crop(data.draw(st.integers(0, max(0, limit))))

    def recorded(self):
        """How many tokens the library's window layers can take back and still have their window."""
        held = [layer.keys.shape[-2] for layer in self.pair.theirs.layers if layer.is_sliding]
        return min(max(0, h - 20) if h < self.pair.length else h - 1 for h in held)

    @rule()
    def copy(self):
        self.pair.ours = copy.deepcopy(self.pair.ours)

    @rule()
    def pickle(self):
        self.pair.ours = pickle.loads(pickle.dumps(self.pair.ours))

    @rule(rows=st.integers(1, 3))
    def reset(self, rows):
        self.pair.ours.reset()
        record = any(getattr(layer, "record_past", False) for layer in self.pair.ours.layers)
        self.pair.theirs = DynamicCache(config=model_of(self.pair.kind).config)
        if record:
            self.pair.theirs.activate_past_recording()
        self.pair.length, self.pair.rows = 0, rows

    @invariant()
    def reads_the_same(self):
        if hasattr(self, "pair"):
            self.pair.same()


class TableMachine(RuleBasedStateMachine):
    """A page table and the pages it describes against rows of tokens: the memory is what the table says it is."""

    SIZE = 16

    @initialize(rows=st.integers(1, 4), limit=st.one_of(st.none(), st.integers(1, 12)))
    def begin(self, rows, limit):
        self.table = PageTable(self.SIZE, limit)
        self.pages, self.written, self.most = {}, 0, 0
        self.restart(rows)

    def restart(self, rows):
        self.table.start(rows)
        self.tokens, self.length, self.first = [[] for _ in range(rows)], 0, 0

    @rule(count=st.integers(0, 40))
    def extend(self, count):
        start, stop = self.length, self.length + count
        before = copy.deepcopy(vars(self.table))
        missing = self.table.missing(start, stop)
        limit = self.table.max_pages
        fits = limit is None or self.table.pages_in_use + missing <= limit
        used = self.table.pages_in_use
        if not fits:
            with pytest.raises(CacheFullError):
                self.table.extend(start, stop)
            assert vars(self.table) == before
            return
        for source, target in self.table.extend(start, stop):
            self.pages[target] = dict(self.pages[source])
        assert self.table.pages_in_use == used + missing
        self.most = max(self.most, self.table.pages_in_use)
        for row, tokens in zip(self.table.rows, self.tokens, strict=True):
            for position in range(start, stop):
                self.written += 1
                page = row[position // self.SIZE - self.table.dropped]
                assert self.table.references(page) == 1, "a page that another row reads is written"
                self.pages.setdefault(page, {})[position % self.SIZE] = self.written
                tokens.append(self.written)
        self.length = stop

    @precondition(lambda self: self.length > self.first)
    @rule(data=st.data())
    def trim(self, data):
        self.length = data.draw(st.integers(self.first, self.length))
        self.table.trim(self.length)
        for tokens in self.tokens:
            del tokens[self.length :]

    @rule(data=st.data())
    def select(self, data):
        rows = data.draw(st.lists(st.integers(0, len(self.tokens) - 1), min_size=1, max_size=5))
        version = self.table.version
        used = self.table.pages_in_use
        self.table.select(rows)
        assert self.table.version > version
        assert self.table.pages_in_use <= used, "sharing takes no page"
        self.tokens = [list(self.tokens[i]) for i in rows]

    @rule(data=st.data())
    def drop(self, data):
        position = data.draw(st.integers(-3, self.length))
        self.table.drop_before(position)
        self.first = max(self.first, position // self.SIZE * self.SIZE)

    @rule(rows=st.integers(1, 4))
    def start(self, rows):
        self.restart(rows)
        assert self.table.pages_in_use == 0

    @invariant()
    def pages_are_accounted_for(self):
        if not hasattr(self, "table"):
            return
        held = [page for row in self.table.rows for page in row]
        assert all(len(set(row)) == len(row) for row in self.table.rows), "a row holds a page twice"
        for page in range(self.table.high_water):
            assert self.table.references(page) == held.count(page)
        free = self.table.allocator.free
        assert sorted([*set(held), *free]) == list(range(self.table.high_water)), "a page is lost or doubly owned"
        assert self.table.pages_in_use == len(set(held))
        assert self.table.high_water <= self.most, "free pages are used again before new ones"
        wanted = -(-self.length // self.SIZE) - self.table.dropped
        assert all(len(row) == max(0, wanted) for row in self.table.rows)
        if self.table.max_pages is not None:
            assert self.table.pages_in_use <= self.table.max_pages

    @invariant()
    def reads_the_same(self):
        if not hasattr(self, "table"):
            return
        for row, tokens in zip(self.table.rows, self.tokens, strict=True):
            for position in range(self.first, self.length):
                page = row[position // self.SIZE - self.table.dropped]
                assert self.pages[page][position % self.SIZE] == tokens[position]


CacheMachine.TestCase.settings = FAST
TableMachine.TestCase.settings = settings(FAST, max_examples=80)
TestCacheStateful = CacheMachine.TestCase
TestTableStateful = TableMachine.TestCase
