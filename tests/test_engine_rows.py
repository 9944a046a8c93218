"""Bookkeeping of the engine's rows and pages, and choosing tokens: no model takes part."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers.generation import logits_process as theirs

from deepseek_accel.cache.entries import Entries
from deepseek_accel.engine.choosing import Sampling, choose, choose_alone, number, sampling_of
from deepseek_accel.engine.observer import Watch
from deepseek_accel.engine.requests import Request
from deepseek_accel.engine.rows import OutOfPages, Rows
from deepseek_accel.engine.scheduler import Scheduler, Sequence
from deepseek_accel.engine.settings import Settings

CPU = torch.device("cpu")
PAGE = 16


def make_rows(num_rows=4, max_pages=None, keeps=True):
    rows = Rows(num_rows, CPU, PAGE, [Entries(1, 3, 2, torch.float32)] * 2, max_pages, keeps=keeps)
    rows.begin(b"state")
    return rows


def sequence(number, tokens, new=1000):
    request = Request(number, None, lambda request: None)
    return Sequence(request, Settings(new, frozenset(), Sampling(False), None, (), None, None, None, 0), list(tokens))


class Pages(RuleBasedStateMachine):
    """A scheduler whose rows grow, end, are cancelled and preempted at random, on few pages."""

    @initialize(most=st.integers(4, 24), num_rows=st.integers(1, 5), keeps=st.booleans())
    def begin(self, most, num_rows, keeps):
        self.rows, self.most, self.count = make_rows(num_rows, most, keeps), most, 0
        self.scheduler = Scheduler(num_rows, Watch(None), self.rows)
        self.alive = {}
        self.contents = {}

    @rule(length=st.integers(1, 150), kind=st.integers(0, 1))
    def submit(self, length, kind):
        new = sequence(self.count, [kind] * length)  # of few kinds: they share prefixes
        self.count += 1
        self.alive[new.request.id] = new
        self.scheduler.add(new)

    @rule(allowed=st.integers(1, 5))
    def admit(self, allowed):
        before = list(self.scheduler.waiting)
        self.scheduler.admit(allowed)
        admitted = [each.request.id for each in self.scheduler.running]
        skipped = [i for i in before if i not in self.scheduler.waiting]
        assert before[: len(skipped)] == skipped  # in their order
        assert len(admitted) == len(set(admitted))
        for each in self.scheduler.running:
            if each.is_prompt:
                assert each.length % PAGE == 0
                assert each.length < each.goal  # something is left to compute
                each.length = each.goal
                self.scheduler.keep_prompt(each)

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data(), count=st.integers(1, 40))
    def grow(self, data, count):
        each = data.draw(st.sampled_from(self.scheduler.running))
        if each.is_prompt:
            return
        before = [list(row) for row in self.rows.rows]
        try:
            self.rows.extend(each.row, each.length + count)
        except OutOfPages:
            assert self.rows.rows == before
            return
        each.tokens += [each.request.id % 2] * count
        each.length += count

    @precondition(lambda self: self.scheduler.running)
    @rule()
    def preempt_the_youngest(self):
        self.scheduler.preempt(self.scheduler.running[-1])

    @precondition(lambda self: self.scheduler.running or self.scheduler.waiting)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data, keep):
        each = data.draw(st.sampled_from(self.scheduler.everyone()))
        self.scheduler.finish(each, "cancelled", keep=keep)

    @rule()
    def evict(self):
        self.rows.evict()

    @invariant()
    def every_page_is_accounted_for(self):
        rows, allocator = self.rows, self.rows.allocator
        held = [page for row in rows.rows for page in row]
        kept = list(rows.kept._pages.values())
        for page, count in enumerate(allocator.references):
            assert count == held.count(page) + kept.count(page)
        assert sorted(allocator.free) == [p for p, count in enumerate(allocator.references) if not count]
        assert rows.pages_in_use <= self.most
        assert rows.capacity >= allocator.high_water
        assert rows.keeps or not kept

    @invariant()
    def rows_have_what_they_need_and_no_more(self):
        scheduler, rows = self.scheduler, self.rows
        assert len({each.row for each in scheduler.running}) == len(scheduler.running)
        assert sorted([*scheduler._free, *(each.row for each in scheduler.running)]) == list(range(len(rows.rows)))
        for each in scheduler.running:
            assert len(rows.rows[each.row]) == rows.pages_for(max(each.length, each.goal))
        for row in scheduler._free:
            assert rows.rows[row] == []
        # less than a page of each row is empty
        room = sum(len(row) for row in rows.rows) * PAGE
        if all(not each.is_prompt for each in scheduler.running):
            assert room - scheduler.tokens_held < PAGE * max(1, len(scheduler.running))

    @invariant()
    def nobody_is_lost(self):
        known = {each.request.id for each in self.scheduler.everyone()}
        assert known == {i for i, each in self.alive.items() if not each.request.done}


TestPages = Pages.TestCase
TestPages.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_rows_of_a_thousand_tokens_waste_less_than_five_percent():
    draw = random.Random(0)
    rows = Rows(64, CPU, 64, [Entries(1, 1, 1, torch.float32)], None, keeps=False)
    scheduler = Scheduler(64, Watch(None), rows)
    for i in range(64):
        scheduler.add(sequence(i, [1] * draw.randrange(700, 1500)))
    scheduler.admit(64)
    for each in scheduler.running:
        each.length = each.goal
    assert len(scheduler.running) == 64
    assert 0 < scheduler.fragmentation() < 0.05


def test_pages_grow_with_their_contents_and_padding_stays_in_the_row():
    rows = make_rows()
    rows.extend(0, 40)
    for storage in rows.storages.values():
        storage.flatten(0, 1)[: 3 * PAGE] = 7.0
    rows.extend(1, 200 * PAGE)
    assert rows.capacity >= 203
    for storage in rows.storages.values():
        assert storage[:3].eq(7).all()
        assert storage[3:].eq(0).all()  # what has not been written is finite
    table = rows.block_table()
    assert table.shape == (4, 200)
    assert table[0].tolist() == [0, 1, 2] + [0] * 197
    assert sorted(table[1].tolist()) == list(range(3, 203))
    rows.give_back(1)
    rows.extend(2, PAGE)
    assert rows.storages[0][rows.rows[2]].eq(0).all()


def test_where_memory_ends_pages_end(monkeypatch):
    rows = make_rows(keeps=False)
    rows.extend(0, 60 * PAGE)
    before, grow_to = list(rows.rows[0]), Rows._grow_to

    def no_more(self, pages):
        if pages > 70:
            raise torch.OutOfMemoryError("injected")
        grow_to(self, pages)

    monkeypatch.setattr(Rows, "_grow_to", no_more)
    rows.extend(1, 10 * PAGE)  # exactly what is needed, where more is not to be had
    with pytest.raises(OutOfPages):
        rows.extend(2, PAGE)
    assert rows.most_pages == 70
    assert rows.rows[0] == before
    assert rows.rows[2] == []
    rows.give_back(1)
    rows.extend(2, PAGE)


def test_another_state_of_the_model_forgets_prefixes():
    rows = make_rows()
    rows.extend(0, 3 * PAGE)
    keys = rows.keys([5] * 3 * PAGE)
    rows.keep(0, keys)
    rows.give_back(0)
    assert rows.count_kept(rows.keys([5] * 50)) == 3
    assert rows.keys([5] * 50, keys[:1]) == keys
    rows.begin(b"state")
    assert rows.pages_in_use == 3
    rows.begin(b"another")
    assert rows.pages_in_use == 0
    assert rows.keys([5] * 50) != keys


@pytest.mark.parametrize("fp8", [None, "e4m3"])
def test_memory_is_given_back_when_no_row_holds_pages(fp8):
    entries = [Entries(1, 30, 20, torch.float32, fp8), Entries(1, 3, 2, torch.float32, fp8)]
    page_bytes = sum(each.row_bytes for each in entries) * PAGE
    rows = Rows(2, CPU, PAGE, entries, None, keeps=True, kept_bytes=80 * page_bytes)
    rows.begin(b"state")
    first = rows.bytes_reserved()
    rows.extend(0, 150 * PAGE)
    rows.extend(1, 5 * PAGE)
    held = {}
    for layer, storage in rows.storages.items():
        for page in rows.rows[1]:
            storage[page] = page - 140 + layer
        held[layer] = storage[rows.rows[1]].clone()
    keys = rows.keys([5] * 5 * PAGE)
    rows.keep(1, keys)
    rows.give_back(1)
    grown, version = rows.bytes_reserved(), rows.version
    rows.settle()  # a row holds pages
    assert (rows.bytes_reserved(), rows.version) == (grown, version)
    assert grown > 2 * first
    rows.give_back(0)
    rows.settle()
    assert rows.bytes_reserved() == first
    assert rows.version > version + 1  # whoever knows where storages are must look again
    assert rows.pages_in_use == rows.count_kept(keys) == 5
    assert not rows.allocator.free
    rows.take_kept(0, keys)
    rows.extend(0, 7 * PAGE)
    rows.extend(1, 70 * PAGE)
    assert sorted(rows.rows[0] + rows.rows[1]) == list(range(77))
    for layer, storage in rows.storages.items():
        assert torch.equal(storage[rows.rows[0][:5]], held[layer])
        assert not storage[rows.rows[1]].any()
    for row in (0, 1):
        rows.give_back(row)
    version = rows.version
    rows.settle()  # little more than may be kept: it would only grow again
    assert (rows.capacity, rows.version) == (96, version)


def test_memory_that_max_pages_promises_stays():
    rows = make_rows(1, max_pages=400)
    rows.extend(0, 300 * PAGE)
    rows.give_back(0)
    rows.settle()
    assert rows.capacity >= 300


def test_keys_made_of_another_state_keep_nothing():
    rows = make_rows(2, max_pages=2)
    scheduler = Scheduler(2, Watch(None), rows)
    runs, waits = sequence(0, [1] * (2 * PAGE - 1)), sequence(1, [5] * (2 * PAGE - 1))
    for each in (runs, waits):
        scheduler.add(each)
    scheduler.admit(2)
    assert scheduler.running == [runs]
    assert waits.keys == rows.keys(waits.tokens)
    scheduler.finish(runs, "length", keep=False)
    rows.begin(b"another")
    scheduler.admit(2)
    waits.length = waits.goal
    scheduler.keep_prompt(waits)
    assert rows.count_kept(rows.keys(waits.tokens)) == 1
    scheduler.finish(waits, "length")
    assert len(rows.kept) == 1


# --- choosing


def logits(rows=5, size=97, seed=0):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


def their_probabilities(scores, rule):
    if rule.temperature != 1.0:
        scores = theirs.TemperatureLogitsWarper(rule.temperature)(None, scores)
    if rule.top_k:
        scores = theirs.TopKLogitsWarper(rule.top_k)(None, scores)
    if rule.top_p < 1:
        scores = theirs.TopPLogitsWarper(rule.top_p)(None, scores)
    if rule.min_p:
        scores = theirs.MinPLogitsWarper(rule.min_p)(None, scores)
    return scores.softmax(-1)


@given(
    st.lists(
        st.builds(
            Sampling,
            st.just(True),
            st.sampled_from([0.3, 1.0, 2.5]),
            st.sampled_from([0, 1, 7, 500]),
            st.sampled_from([1.0, 0.9, 0.01]),
            st.sampled_from([0.0, 0.2]),
        ),
        min_size=3,
        max_size=3,
    ),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_rows_draw_from_what_transformers_leaves_of_them(rules, seed):
    scores = logits(3, seed=seed)
    rules = [*rules, Sampling(False)]
    scores = torch.cat((scores, scores[:1]))
    expected = torch.cat([their_probabilities(scores[i : i + 1].clone(), rule) for i, rule in enumerate(rules[:3])])
    sums = expected.double().cumsum(-1)
    for step in range(8):
        numbers = [number(seed, 8 * i + step) for i in range(3)] + [0.5]
        tokens = choose(scores, rules, numbers)
        assert tokens[3] == scores[3].argmax()
        for i in range(3):
            token = int(tokens[i])
            assert expected[i, token] > 0
            below = float(sums[i, token - 1]) if token else 0.0
            assert below - 1e-5 <= numbers[i] * float(sums[i, -1]) <= float(sums[i, token]) + 1e-5


def test_drawn_tokens_have_the_probabilities_of_the_row():
    row = torch.tensor([[0.0, 1.0, 2.0, -torch.inf, 0.5]])
    expected = row.softmax(-1)[0]
    count = 4000
    tokens = choose(row.expand(count, -1), [Sampling(True)] * count, [number(7, i) for i in range(count)])
    found = torch.bincount(tokens, minlength=5) / count
    assert found[3] == 0
    assert (found - expected).abs().max() < 0.03


def test_rows_without_finite_probabilities_are_told_apart():
    rows = torch.stack([torch.full((9,), -torch.inf), torch.zeros(9), torch.full((9,), torch.nan)])
    tokens = choose(rows, [Sampling(True)] * 3, [0.5] * 3)
    assert tokens[0] == tokens[2] == -1
    assert 0 <= tokens[1] < 9
    assert choose_alone(lambda ids, scores: scores, torch.zeros(1, 1), rows[2:], False, 0.5) == -1


def test_numbers_are_spread_and_depend_on_seed_and_place():
    numbers = [number(seed, place) for seed in range(40) for place in range(40)]
    assert len(set(numbers)) == 1600
    assert all(0 < each < 1 for each in numbers)
    assert abs(sum(numbers) / 1600 - 0.5) < 0.03


def test_what_may_run_on_the_device_is_recognised():
    known = [theirs.TemperatureLogitsWarper(0.5), theirs.TopKLogitsWarper(9), theirs.TopPLogitsWarper(0.9)]
    assert sampling_of(known, True) == Sampling(True, 0.5, 9, 0.9)
    assert sampling_of([], False) == Sampling(False)
    assert sampling_of(known[::-1], True) is None  # another order does something else
    assert sampling_of([*known[:1], theirs.TopPLogitsWarper(0.9, min_tokens_to_keep=2)], True) is None
    assert sampling_of([*known, theirs.TopKLogitsWarper(3)], True) is None
    assert sampling_of([theirs.TopKLogitsWarper(3, filter_value=-5.0)], True) is None
    assert sampling_of([theirs.RepetitionPenaltyLogitsProcessor(1.2)], False) is None
