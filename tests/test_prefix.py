"""Kept pages and pages that several caches share, without a model: keys, order of eviction, and any order of calls."""

import copy
import hashlib
import pickle
import random
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepseek_accel import CacheFullError
from deepseek_accel.cache.allocator import PageAllocator
from deepseek_accel.cache.pages import PageTable
from deepseek_accel.cache.prefix import KeptPages, chain
from deepseek_accel.cache.shared import SharedPages

SIZE = 16
CPU = torch.device("cpu")


def keys_of(tokens, root=b"root"):
    data = torch.tensor(tokens, dtype=torch.int64).numpy().tobytes()
    return list(chain(root, data, 8 * SIZE))


def test_a_key_is_the_hash_of_the_key_before_and_the_ids():
    tokens = list(range(40))
    ids = torch.tensor(tokens).numpy().tobytes()
    first = hashlib.sha256(b"root" + ids[: 8 * SIZE]).digest()
    second = hashlib.sha256(first + ids[8 * SIZE : 16 * SIZE]).digest()
    assert keys_of(tokens) == [first, second]
    assert keys_of(tokens[:15]) == []
    assert keys_of(tokens, b"other")[0] != first
    assert keys_of([99, *tokens[1:]])[1] != second, "the same page after another one"


def kept_pages(*sequences):
    """KeptPages that alone hold one page for every key."""
    allocator = PageAllocator()
    kept = KeptPages(allocator)
    for keys in sequences:
        pages = {key: allocator.take() for key in keys if key not in kept}
        kept.add(pages)
        allocator.release(pages.values())
        kept.touch(keys)
    return kept, allocator


def test_the_end_of_what_was_used_longest_ago_goes_first():
    one, other = [b"a", b"b", b"c"], [b"a", b"x"]
    kept, allocator = kept_pages(one, other)
    assert allocator.in_use == 4
    kept.touch(one)
    order = []
    while len(kept):
        before = {key for key in (*one, *other) if key in kept}
        assert kept.evict_to(len(kept) - 1) == 1
        order += before - {key for key in before if key in kept}
    assert order == [b"x", b"c", b"b", b"a"]
    assert allocator.in_use == 0


def test_pages_that_somebody_reads_are_not_freed_for_others():
    kept, allocator = kept_pages([b"a", b"b", b"c"])
    held = kept.take([b"a", b"b"])
    allocator.hold(held)
    assert kept.evict_unused(2) == 0
    assert len(kept) == 3
    assert kept.evict_unused(1) == 1
    assert b"c" not in kept
    allocator.release(held)
    assert kept.evict_unused(2) == 2
    assert allocator.in_use == 0


def shared_pages(max_pages=None, budget_pages=1000):
    return SharedPages(CPU, SIZE, max_pages, budget_pages * SIZE * 4, Counter())


class Rows:
    """One cache of one layer whose entries are numbers, and what they must read as."""

    def __init__(self, shared, prompts, reserve=0):
        self.shared = shared
        self.keys = [keys_of(prompt) for prompt in prompts]
        pages = shared.take([keys[: (len(prompts[0]) - 1) // SIZE] for keys in self.keys])
        self.pool = shared.pool(len(prompts), reserve)
        self.pool.begin_with(pages)
        self.pool.add_layer(0, 1, torch.float32)
        self.length = len(pages[0]) * SIZE
        self.tokens = [list(prompt[: self.length]) for prompt in prompts]
        self.hits = len(pages[0])

    def extend(self, rows):
        """Add to each row the tokens given for it."""
        start, stop = self.length, self.length + len(rows[0])
        self.pool.check(start, stop, False)
        self.pool.extend(start, stop)
        slots = self.pool.slots(start, stop)
        entries = torch.tensor(rows, dtype=torch.float32).flatten().view(-1, 1)
        self.pool.storages[0].flatten(0, 1).index_copy_(0, slots, entries)
        self.length = stop
        for tokens, new in zip(self.tokens, rows, strict=True):
            tokens += new

    def trim(self, length):
        self.length = length
        self.pool.trim(length)
        for tokens in self.tokens:
            del tokens[length:]

    def select(self, rows):
        self.pool.select(rows)
        self.tokens = [list(self.tokens[i]) for i in rows]

    def keep(self):
        self.shared.keep(self.pool, [keys_of(tokens) for tokens in self.tokens], [(1, 1, 0)], torch.float32)

    def read(self):
        pages = self.pool.storages[0][self.pool.block_table().long()]
        return pages.flatten(1)[:, : self.length].tolist()


def filled(shared, *prompts):
    rows = Rows(shared, prompts)
    rows.extend([list(prompt[rows.length :]) for prompt in prompts])
    return rows


def test_a_second_cache_begins_with_the_pages_themselves():
    shared = shared_pages()
    prompt = list(range(50))
    first = filled(shared, prompt)
    first.keep()
    second = Rows(shared, [prompt])
    assert second.hits == 3
    assert second.pool.table.rows[0] == first.pool.table.rows[0][:3]
    second.extend([[7] * 20])
    assert first.read() == [prompt]
    assert second.read() == [prompt[:48] + [7] * 20]
    assert shared.num_caches() == 2
    del first, second
    assert shared.num_caches() == 0
    assert shared.pages_in_use() == len(shared.kept) == 3


def test_a_kept_page_is_never_written():
    """A cache that takes tokens back and writes others copies the page first."""
    shared = shared_pages()
    prompt = list(range(48))
    first = filled(shared, prompt)
    first.keep()
    first.trim(40)
    first.extend([[9] * 8])
    assert first.read() == [prompt[:40] + [9] * 8]
    again = Rows(shared, [[*prompt, 1]])
    assert again.hits == 3
    assert again.read() == [prompt]


def test_storages_that_move_leave_other_caches_where_they_are():
    """A cache that grows must not take what another one is writing away from it, nor lose what is kept."""
    shared = shared_pages()
    first = filled(shared, list(range(20)))
    old = first.pool.storages[0]
    second = filled(shared, list(range(100, 300)))
    assert second.pool.storages[0] is shared.storages[0] is not old
    first.extend([[1] * 12])  # fits into its page: stays
    assert first.pool.storages[0] is old
    first.keep()
    held = [*range(20), *[1] * 12]
    assert Rows(shared, [[*held, 5]]).read() == [held], "kept where it is not read"
    first.extend([[2] * 90])
    assert first.pool.storages[0] is shared.storages[0]
    assert first.read() == [[*held, *[2] * 90]]
    assert second.read() == [list(range(100, 300))]


def test_memory_beyond_what_may_be_kept_goes_after_the_call():
    shared = shared_pages(budget_pages=4)
    prompt = list(range(200))
    rows = filled(shared, prompt)
    rows.keep()
    assert len(shared.kept) == 4
    shared.settle()
    assert shared.bytes_reserved() >= 13 * SIZE * 4, "somebody reads them"
    del rows
    shared.settle()
    assert shared.bytes_reserved() == shared.kept_bytes() == 4 * SIZE * 4
    assert Rows(shared, [prompt]).read() == [prompt[:64]]
    assert shared.counters["kv_cache: kept pages evicted"] == 8


def test_kept_pages_go_before_max_pages_is_an_error():
    shared = shared_pages(max_pages=6)
    filled(shared, list(range(64))).keep()
    assert len(shared.kept) == 4
    second = filled(shared, list(range(100, 180)))
    assert len(shared.kept) == 1
    before = copy.deepcopy(shared.allocator)
    with pytest.raises(CacheFullError, match="max_pages is 6; other caches of this model hold 1"):
        second.extend([[1] * 40])
    assert shared.allocator == before
    assert len(shared.kept) == 1, "nothing is forgotten in vain"
    second.extend([[1] * 16])
    assert len(shared.kept) == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))])
def test_a_copied_pool_stands_alone(copied):
    shared = shared_pages()
    rows = filled(shared, list(range(40)), [*range(32), *[5] * 8])
    rows.pool.select([1, 0, 0])
    twin = copied(rows.pool)
    assert twin.table.is_alone
    assert not hasattr(twin, "shared")
    assert twin.table.pages_in_use == rows.pool.table.pages_in_use == 6
    table = twin.block_table().long()
    expected = rows.pool.storages[0][rows.pool.block_table().long()].flatten(1)[:, :40]
    assert torch.equal(twin.storages[0][table].flatten(1)[:, :40], expected)
    twin.extend(40, 41)
    assert shared.pages_in_use() == 6


def test_shrinking_what_is_kept_does_not_reach_a_living_cache():
    shared = shared_pages(budget_pages=2)
    rows = filled(shared, list(range(40)))
    filled(shared, list(range(50, 150))).keep()
    shared.settle()
    rows.extend([[3] * 100])
    assert rows.read() == [[*range(40), *[3] * 100]]


class SharedMachine(RuleBasedStateMachine):
    """Any order of calls of several caches: each reads what was written to it, and every page is accounted for."""

    @initialize(budget=st.integers(1, 20), limit=st.one_of(st.none(), st.integers(8, 30)))
    def begin(self, budget, limit):
        self.shared = shared_pages(limit, budget)
        self.caches = []
        self.contents = {}
        self.next = 1000

    def one(self, data):
        """By number: what hypothesis draws it also holds."""
        return self.caches[data.draw(st.integers(0, len(self.caches) - 1))]

    def prompt(self, stem, length, seed):
        """Prompts of one stem begin alike; one in three goes its own way at the end."""
        tokens = [stem * 100 + i for i in range(length)]
        return tokens if seed % 3 else [*tokens[:-1], seed]

    @rule(stem=st.integers(0, 2), length=st.integers(1, 80), rows=st.integers(1, 3), seed=st.integers(0, 9))
    def start(self, stem, length, rows, seed):
        prompts = [self.prompt(stem, length, seed + i) for i in range(rows)]
        cache = Rows(self.shared, prompts, reserve=seed)
        try:
            cache.extend([prompt[cache.length :] for prompt in prompts])
        except CacheFullError:
            del cache
            return
        self.caches.append(cache)

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), count=st.integers(0, 60))
    def extend(self, data, count):
        cache = self.one(data)
        new = [[self.next + i * count + j for j in range(count)] for i in range(len(cache.tokens))]
        self.next += 1000
        before = copy.deepcopy((cache.pool.table.rows, cache.length))
        try:
            cache.extend(new)
        except CacheFullError:
            assert (cache.pool.table.rows, cache.length) == before
            assert self.shared.allocator.in_use + cache.pool.table.missing(cache.length, cache.length + count) > (
                self.shared.allocator.max_pages
            ), "a fault although it fits"

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def trim(self, data):
        cache = self.one(data)
        cache.trim(data.draw(st.integers(0, cache.length)))

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def select(self, data):
        cache = self.one(data)
        cache.select(data.draw(st.lists(st.integers(0, len(cache.tokens) - 1), min_size=1, max_size=3)))

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def keep(self, data):
        cache = self.one(data)
        cache.keep()
        for tokens in cache.tokens:
            self.contents |= {key: tokens[: (i + 1) * SIZE] for i, key in enumerate(keys_of(tokens))}

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def die(self, data):
        del self.caches[data.draw(st.integers(0, len(self.caches) - 1))]

    @rule()
    def settle(self):
        self.shared.settle()
        if not self.caches:
            assert self.shared.bytes_reserved() <= self.shared.budget_bytes

    @invariant()
    def pages_are_accounted_for(self):
        if not hasattr(self, "shared"):
            return
        allocator, kept = self.shared.allocator, self.shared.kept._pages
        in_use = self.shared.pages_in_use()
        held = Counter(page for cache in self.caches for row in cache.pool.table.rows for page in row)
        held.update(kept.values())
        assert [held[page] for page in range(allocator.high_water)] == allocator.references
        assert sorted([*held, *allocator.free]) == list(range(allocator.high_water)), "lost or owned twice"
        assert in_use == len(held)
        assert len(kept) <= self.shared.budget_bytes // (SIZE * 4)
        assert self.shared.num_caches() == len(self.caches)
        if allocator.max_pages is not None:
            assert in_use <= allocator.max_pages

    @invariant()
    def everything_reads_as_written(self):
        if not hasattr(self, "shared"):
            return
        for cache in self.caches:
            assert cache.read() == cache.tokens
        for key, page in self.shared.kept._pages.items():
            assert self.shared.storages[0][page].flatten().tolist() == self.contents[key][-SIZE:]


SharedMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestSharedStateful = SharedMachine.TestCase


@pytest.mark.parametrize("lengths", ["log-uniform", "uniform"])
def test_S24_nothing_fragments_under_a_random_mix_of_requests(lengths):
    """Requests of 32 to 8,192 tokens come and go at the limit of the pool, in any order. One is refused only when it
    needs more pages than are free: no free page is unusable. What is lost is half a page per sequence, at its end."""
    limit, size = 2000, 64
    allocator = PageAllocator(limit)
    rng = random.Random(0)
    live, refused, faults, unfilled, tokens, sequences = [], 0, 0, 0, 0, 0
    for _ in range(3000):
        length = int(2 ** rng.uniform(5, 13)) if lengths == "log-uniform" else rng.randint(32, 8192)
        table = PageTable(size, allocator=allocator)
        table.start(1)
        fits = allocator.in_use + -(-length // size) <= limit
        try:
            table.extend(0, length)
            live.append((table, length))
            assert fits
        except CacheFullError:
            refused += 1
            faults += fits
            for _ in range(rng.randint(1, 3)):
                live.pop(rng.randrange(len(live)))[0].trim(0)
        sequences += len(live)
        tokens += sum(length for _, length in live)
        unfilled += allocator.in_use * size - sum(length for _, length in live)
        assert sorted([p for t, _ in live for p in t.rows[0]] + allocator.free) == list(range(allocator.high_water))
    print(f"{lengths}: {refused} of 3000 refused, {faults} faults; unfilled ends {unfilled / (unfilled + tokens):.2%}")
    assert refused > 100
    assert faults == 0, "free pages that could not be used"
    assert 0.4 * size < unfilled / sequences < 0.6 * size


def test_a_move_that_breaks_off_keeps_nothing(monkeypatch):
    """Some layers moved, some not: a page id would mean another page in each."""
    shared = shared_pages(budget_pages=4)
    prompt = list(range(200))
    filled(shared, prompt).keep()
    broken = torch.Tensor.__getitem__

    def no_memory(self, index):
        if isinstance(index, torch.Tensor) and self.dim() == 3:
            raise torch.OutOfMemoryError("no memory")
        return broken(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__getitem__", no_memory)
        shared.settle()
    assert len(shared.kept) == 0 and not shared.storages
    assert shared.pages_in_use() == 0
    rows = filled(shared, prompt)
    rows.keep()
    assert rows.read() == [prompt]


def test_nothing_moves_while_a_call_is_about_to_begin():
    """Between taking pages and making a table for them a call of another thread may end."""
    shared = shared_pages(budget_pages=4)
    prompt = list(range(200))
    filled(shared, prompt).keep()
    guest = shared.enter()
    before = list(shared.kept._pages.values())
    shared.settle()
    assert list(shared.kept._pages.values()) == before and shared.num_caches() == 1
    del guest
    shared.settle()
    assert shared.num_caches() == 0 and shared.bytes_reserved() == shared.kept_bytes()
