"""The memory guard: the order of its steps, hysteresis, no flapping; and what it reads from a device."""

import itertools
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepseek_accel import AccelError, KVCache, PlanError
from deepseek_accel.cache import Window
from deepseek_accel.engine.guard import DeviceMemory, MemoryGuard, Stage, _group_room

LIMIT = 1_000
HIGH, BAND, CALM = 960, 920, 100

levels = st.lists(st.integers(0, LIMIT), max_size=200)


def guard_at(rows=64, **options):
    guard = MemoryGuard(**({"patience": 2, "calm": 3} | options))
    guard.start(rows)
    return guard


def test_the_ladder_up_in_its_order(caplog):
    guard = guard_at(8, shrink="fp8_e4m3", patience=1)
    with caplog.at_level(logging.INFO, "deepseek_accel.engine.guard"):
        seen = [(guard.react(HIGH, LIMIT), guard.admitted) for _ in range(6)]
    assert seen == [
        (Stage.EVICT_PREFIXES, 8),
        (Stage.LOWER_ADMISSION, 4),
        (Stage.SHRINK, 4),
        (Stage.SHRINK, 2),
        (Stage.SHRINK, 1),
        (Stage.SHRINK, 1),  # the floor
    ]
    assert guard.counts == {"evict_prefixes": 1, "lower_admission": 3, "shrink": 1}
    assert len(caplog.records) == 5  # one line a step, none for what changed nothing
    assert "96.0% of 1,000 bytes" in caplog.text


def test_without_shrink_it_goes_on_halving():
    guard = guard_at(8, patience=1)
    stages = [guard.react(HIGH, LIMIT) for _ in range(20)]
    assert max(stages) is Stage.LOWER_ADMISSION and guard.admitted == 1


def test_a_step_has_time_to_take_effect():
    guard = guard_at(patience=5)
    assert [guard.react(HIGH, LIMIT) for _ in range(7)] == [1, 1, 1, 1, 1, 2, 2]


def test_halving_begins_at_what_runs_and_waits_for_rows_to_leave():
    guard = guard_at(128, patience=1)
    guard.react(HIGH, LIMIT, 10)
    guard.react(HIGH, LIMIT, 10)
    assert guard.admitted == 5
    for _ in range(5):
        guard.react(HIGH, LIMIT, 10)
    assert guard.admitted == 5  # ten still run
    guard.react(HIGH, LIMIT, 5)
    assert guard.admitted == 2


def test_the_way_back():
    guard = guard_at(4, shrink="fp8_e4m3", patience=1, calm=2)
    for _ in range(10):
        guard.react(HIGH, LIMIT)
    assert (guard.stage, guard.admitted) == (Stage.SHRINK, 1)
    seen = [(guard.react(CALM, LIMIT), guard.admitted) for _ in range(10)]
    assert seen[0] == (Stage.SHRINK, 1)  # one calm call is not two
    assert (
        seen[1::2]
        == [(Stage.LOWER_ADMISSION, 2), (Stage.LOWER_ADMISSION, 3), (Stage.LOWER_ADMISSION, 4)]
        + [(Stage.NORMAL, 4)] * 2
    )
    assert guard.counts["recover"] == 4


def test_shrinking_ends_where_twice_the_bytes_are_no_harm_or_nothing_runs():
    guard = guard_at(4, shrink="fp8_e4m3", patience=1, calm=1)
    for _ in range(10):
        guard.react(HIGH, LIMIT)
    assert [guard.react(460, LIMIT, 3) for _ in range(9)] == [Stage.SHRINK] * 9 and guard.admitted == 4
    assert guard.react(460, LIMIT, 0) is Stage.LOWER_ADMISSION
    for _ in range(10):
        guard.react(HIGH, LIMIT)
    assert guard.react(440, LIMIT, 3) is Stage.LOWER_ADMISSION


def test_out_of_memory_admits_fewer_at_once():
    guard = guard_at(64)
    assert guard.out_of_memory(running=40) is Stage.LOWER_ADMISSION and guard.admitted == 20
    assert guard.out_of_memory(running=0) is Stage.LOWER_ADMISSION and guard.admitted == 10
    assert guard.react(HIGH, LIMIT) is Stage.LOWER_ADMISSION and guard.admitted == 10  # patience counts from here
    assert guard.counts == {"out_of_memory": 2, "evict_prefixes": 1, "lower_admission": 2}


@given(levels, st.integers(0, LIMIT), st.integers(0, LIMIT))
def test_more_memory_in_use_never_means_less_caution(history, one, other):
    low, high = sorted((one, other))
    outcomes = []
    for last in (low, high):
        guard = guard_at(shrink="fp8_e5m2")
        for used in history:
            guard.react(used, LIMIT)
        outcomes.append((guard.react(last, LIMIT), -guard.admitted))
    assert outcomes[0][0] <= outcomes[1][0] and outcomes[0][1] <= outcomes[1][1]


@given(st.lists(st.tuples(st.integers(905, LIMIT), st.integers(0, 95)), max_size=100))
def test_more_pressure_over_time_never_means_less_caution(pairs):
    """Of two histories that never recover, the one above the other at all times is never behind."""
    less, more = guard_at(shrink="fp8_e4m3"), guard_at(shrink="fp8_e4m3")
    for used, extra in pairs:
        assert less.react(used, LIMIT) <= more.react(min(LIMIT, used + extra), LIMIT)
        assert less.admitted >= more.admitted


@given(levels, st.integers(0, LIMIT))
def test_a_level_that_stays_moves_it_in_one_direction_only(history, level):
    guard = guard_at()
    for used in history:
        guard.react(used, LIMIT)
    path = []
    for _ in range(250):
        guard.react(level, LIMIT)
        path.append((guard.stage, -guard.admitted))
    assert path in (sorted(path), sorted(path, reverse=True))
    if 900 <= level < 950:
        assert len(set(path)) == 1  # between the marks nothing changes


@given(levels)
def test_changes_keep_their_distance_and_their_marks(history):
    guard = guard_at(patience=2, calm=3)
    before, last_up, calm = (guard.stage, -guard.admitted), -10, 0
    for i, used in enumerate(history):
        calm = calm + 1 if used < 900 else 0
        guard.react(used, LIMIT)
        after = (guard.stage, -guard.admitted)
        if after > before:
            assert used >= 950 and i - last_up >= 2
            last_up = i
        elif after < before:
            assert used < 900 and calm >= 3
            calm = 0
        before = after


@given(st.integers(0, 800), st.floats(1.0, 50.0), st.integers(20, 128), st.sampled_from([None, "fp8_e4m3"]))
def test_a_load_that_wants_too_many_rows_settles(weights, per_row, rows, shrink):
    """Memory grows with the rows that run, each of them less than the distance of the marks, and as many as may want to
    run: it must end between the marks, or at an end of the range, and stay there. Not: recover, run short again."""
    guard = guard_at(rows, shrink=shrink)
    trail = []
    for _ in range(3_000):
        running = guard.admitted
        each = per_row / 2 if guard.stage is Stage.SHRINK else per_row
        guard.react(int(weights + running * each), LIMIT, running)
        trail.append((guard.stage, guard.admitted))
    assert len(set(trail[1_500:])) == 1


@pytest.mark.parametrize("each, rows", [(160, 8), (600, 4)])
def test_where_one_row_more_is_too_many_it_is_tried_ever_more_rarely(each, rows):
    guard = guard_at(rows, patience=2, calm=4)
    trail = []
    for _ in range(20_000):
        trail.append(guard.admitted)
        guard.react(each * guard.admitted, LIMIT, guard.admitted)
    falls = [i for i, (a, b) in enumerate(itertools.pairwise(trail)) if b < a]
    apart = [b - a for a, b in itertools.pairwise(falls)]
    assert len(falls) < 90 and apart[-1] >= 4 * 64 and guard.stage is Stage.LOWER_ADMISSION
    fitting = LIMIT * 95 // 100 // each
    assert trail.count(fitting) > 15_000  # and in between as many run as fit
    for _ in range(10_000):  # the load is gone: all of it comes back
        guard.react(CALM, LIMIT, guard.admitted)
    assert (guard.stage, guard.admitted) == (Stage.NORMAL, rows)


def test_what_it_accepts():
    assert MemoryGuard(shrink="fp8_e4m3").shrink == KVCache(dtype="fp8_e4m3")
    assert MemoryGuard(shrink=Window()).shrink == KVCache(eviction=Window())
    assert MemoryGuard(shrink=KVCache(dtype="fp8_e5m2", page_size=32)).shrink.page_size == 32
    assert MemoryGuard().shrink is None and MemoryGuard().low == pytest.approx(0.9)
    for wrong in (dict(limit=0), dict(limit=1.1), dict(limit=0.9, low=0.9), dict(patience=0), dict(calm=0)):
        with pytest.raises(PlanError):
            MemoryGuard(**wrong)
    for wrong in ("fp8", "fp4", KVCache(), 3):
        with pytest.raises(AccelError):
            MemoryGuard(shrink=wrong)
    with pytest.raises(PlanError, match="positive"):
        MemoryGuard().react(1, 0)
    with pytest.raises(PlanError):
        MemoryGuard().start(0)


def test_bytes_of_this_process():
    memory = DeviceMemory("cpu", every=0)
    before = memory()
    assert 0 < before.used < before.limit
    ballast = torch.ones(64 << 20, dtype=torch.uint8)
    after = memory()
    assert after.used - before.used > 32 << 20
    assert memory(reusable_bytes=len(ballast)).used < after.used
    assert memory(reusable_bytes=1 << 60).used == 0


def test_a_reading_stands_for_a_while():
    calls = []
    memory = DeviceMemory("cpu", every=60, read=lambda: calls.append(1) or (len(calls), 10))
    assert [memory() for _ in range(3)] == [(1, 10)] * 3
    memory.every = 0
    assert memory() == (2, 10)


def test_a_control_group_with_a_limit(tmp_path):
    assert _group_room(str(tmp_path)) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert _group_room(str(tmp_path)) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50\n")
    assert _group_room(str(tmp_path)) == 350
