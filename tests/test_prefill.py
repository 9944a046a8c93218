"""Prefill in a straight line: its attention by parts, and whole prompts against transformers' own forward."""

import copy
import functools
import itertools
import weakref

import pytest
import torch
from interpreter import interpret
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from deepseek_accel import families, optimize
from deepseek_accel.cache import paged_cache
from deepseek_accel.errors import CacheFullError
from deepseek_accel.generation.lines import read_model
from deepseek_accel.generation.prefill import layer_step, pieces, prefill, tokens_per_piece
from deepseek_accel.generation.step import Stepper
from deepseek_accel.ops.prefill_attention import (
    CASES,
    CUDNN_PIECE,
    Case,
    attend_by_row,
    case_inputs,
    merge,
    prefill_attention,
    prefill_attention_reference,
)
from deepseek_accel.testing import relative_error, tiny_model
from deepseek_accel.versions import cache_argument


def exact(inputs):
    """The definition on whole tensors in float64, one score matrix and one mask."""
    query, key, value = (inputs[name].double().nan_to_num(0) for name in ("query", "key", "value"))
    if inputs["k_shared"] is not None:
        shared = inputs["k_shared"].double().nan_to_num(0)
        key = torch.cat((key, shared.unsqueeze(2).expand(-1, -1, key.shape[2], -1)), -1)
    group = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)
    scores = torch.einsum("bshd,bthd->bhst", query, key) * inputs["scale"]
    queries, keys = torch.arange(query.shape[1]), torch.arange(key.shape[1])
    visible = torch.ones(query.shape[0], 1, len(queries), len(keys), dtype=torch.bool)
    if inputs["causal"]:
        visible &= keys <= queries[:, None]
    if inputs["starts"] is not None:
        visible &= (keys >= inputs["starts"][:, None])[:, None, None]
    scores = scores.masked_fill(~visible, -torch.inf)
    weights = scores.softmax(-1).masked_fill(~visible, 0)
    return torch.einsum("bhst,bthd->bshd", weights, value), scores.logsumexp(-1)


def assert_part(part, expected, tolerance):
    out, lse = expected
    assert part.out.shape == out.shape and part.lse.shape == lse.shape
    assert relative_error(part.out, out) < tolerance
    empty = lse == -torch.inf
    assert torch.equal(part.lse == -torch.inf, empty)
    assert (part.out.transpose(1, 2)[empty] == 0).all()
    assert relative_error(part.lse.masked_fill(empty, 0), lse.masked_fill(empty, 0)) < tolerance


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_is_the_definition(case):
    inputs = case_inputs(case, torch.float64)
    assert_part(prefill_attention_reference(**inputs), exact(inputs), 1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-6), (torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_on_the_cpu(case, dtype, tolerance):
    inputs = case_inputs(case, dtype)
    assert_part(prefill_attention(**inputs), exact(inputs), tolerance)


def run_kernel(case, dtype):
    from deepseek_accel.kernels.prefill_attention import launch
    from deepseek_accel.ops.prefill_attention import Part

    inputs = case_inputs(case, dtype)
    names = ("query", "key", "value", "scale", "k_shared", "causal", "starts")
    return Part(*launch(*(inputs[name] for name in names)))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-6), (torch.float16, 4e-3)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_in_the_interpreter(case, dtype, tolerance):
    assert_part(interpret(run_kernel, case, dtype), exact(case_inputs(case, dtype)), tolerance)


@pytest.mark.parametrize("cuts", [(), (40,), (1, 2, 69), (20, 40, 60)])
def test_parts_merge_into_the_whole(cuts):
    """Cut at a row's start, inside its padding, and behind it."""
    inputs = case_inputs(Case(9, 70, causal=False, starts=(0, 40), batch=2), torch.float64)
    whole = prefill_attention_reference(**inputs)
    parts = []
    for begin, end in itertools.pairwise((0, *cuts, 70)):
        piece = {name: inputs[name][:, begin:end] for name in ("key", "value", "k_shared")}
        parts.append(prefill_attention_reference(**inputs | piece | {"starts": inputs["starts"] - begin}))
    assert relative_error(merge(parts), whole.out) < 1e-12


def test_merging_keeps_rows_without_any_key_at_zero():
    inputs = case_inputs(Case(4, 8, causal=False, starts=(8, 2)), torch.float32)
    parts = [prefill_attention_reference(**inputs) for _ in range(2)]
    assert (merge(parts)[0] == 0).all() and merge(parts).isfinite().all()


def test_a_merge_does_not_write_into_its_parts():
    inputs = case_inputs(Case(4, 8, causal=False), torch.float64)
    part = attend_by_row(*(inputs[n] for n in ("query", "key", "value", "scale", "k_shared", "causal", "starts")))
    before = part.out.clone()
    merge([part, part, part])
    assert torch.equal(part.out, before)


def test_sizes_that_do_not_fit_are_refused():
    inputs = case_inputs(Case(3, 5, causal=False), torch.float32)
    with pytest.raises(ValueError, match="as many keys as queries"):
        prefill_attention(**inputs | {"causal": True})
    with pytest.raises(ValueError, match="do not fit together"):
        prefill_attention(**inputs | {"k_shared": None})


FAMILIES = ("deepseek", "deepseek_v2", "deepseek_v3", "llama", "qwen2")


@pytest.fixture(scope="module")
def models():
    """One tiny model per family, and one with projections' biases where the family knows them; stock ones."""
    made = {name: tiny_model(name) for name in FAMILIES}
    made["deepseek_v3 bias"] = tiny_model("deepseek_v3", attention_bias=True)
    made["deepseek_v2 q_lora"] = tiny_model("deepseek_v2", q_lora_rank=40)
    return made


NAMES = (*FAMILIES, "deepseek_v3 bias", "deepseek_v2 q_lora")


def prompt(batch, count, padding=None, seed=0):
    """ids, attention mask and position ids of a left-padded batch, as `generate` prepares them."""
    ids = torch.randint(2, 128, (batch, count), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(padding or ()):
        ids[row, :pad], mask[row, :pad] = 0, 0
    return ids, mask, (mask.cumsum(-1) - 1).clamp_min(0)


@functools.cache
def stepper_of(model):
    """Of an optimized copy of `model`, which shares its weights."""
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    model = copy.deepcopy(model, memo)
    optimize(model)
    family = families.find(model)
    with torch.no_grad():
        return Stepper(read_model(model, family), family, family.attentions(model)[0]), model


def run(model, ids, padding=None, positions=None, cache=None, tokens=None):
    """(logits, cache) of our prefill, with at most `tokens` in a piece."""
    stepper, optimized = stepper_of(model)
    cache = paged_cache(optimized, page_size=16) if cache is None else cache
    starts = None if padding is None else torch.tensor(padding, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        if tokens is not None:
            patch.setattr("deepseek_accel.generation.prefill.tokens_per_piece", lambda *_: tokens)
        return prefill(stepper, ids, cache, starts, positions), cache


def stock(model, ids, mask=None, positions=None, cache=None):
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        out = model(ids, attention_mask=mask, position_ids=positions, use_cache=True, **{cache_argument(): cache})
    return out.logits[:, -1], cache


def assert_same_entries(ours, theirs, padding):
    for layer, expected in zip(ours.layers, theirs.layers, strict=True):
        assert layer.get_seq_length() == expected.get_seq_length()
        for row, pad in enumerate(padding):
            assert relative_error(layer.keys[row, :, pad:], expected.keys[row, :, pad:]) < 2e-5
            assert relative_error(layer.values[row, :, pad:], expected.values[row, :, pad:]) < 2e-5


@pytest.mark.parametrize("tokens", [1, 3, 7, None])
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_cache_are_stocks(models, name, tokens):
    model = models[name]
    for batch, count in ((1, 19), (2, 5), (3, 1)):
        ids, _, _ = prompt(batch, count)
        logits, cache = run(model, ids, tokens=tokens)
        expected, theirs = stock(model, ids)
        assert relative_error(logits, expected) < 2e-5
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
        assert_same_entries(cache, theirs, [0] * batch)


@pytest.mark.parametrize("tokens", [1, 3, 7, 40, None])
@pytest.mark.parametrize("name", NAMES)
def test_left_padding(models, name, tokens):
    """Rows without padding, with some, and with a single token; pieces that are all padding."""
    model, padding = models[name], (0, 5, 18)
    ids, mask, positions = prompt(3, 19, padding)
    logits, cache = run(model, ids, padding, positions, tokens=tokens)
    expected, theirs = stock(model, ids, mask, positions)
    assert relative_error(logits, expected) < 2e-5
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert_same_entries(cache, theirs, padding)
    for layer in cache.layers:
        assert layer.keys.isfinite().all() and layer.values.isfinite().all()


@pytest.mark.parametrize("tokens", [3, None])
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_that_holds_tokens_goes_on(models, name, tokens):
    model, padding = models[name], (0, 4)
    ids, mask, positions = prompt(2, 40, padding)
    cache, theirs = None, None
    for begin, end in ((0, 17), (17, 18), (18, 40)):
        part = slice(begin, end)
        logits, cache = run(model, ids[:, part], padding, positions[:, part], cache, tokens)
        expected, theirs = stock(model, ids[:, part], mask[:, :end], positions[:, part], theirs)
        assert relative_error(logits, expected) < 2e-5
    assert_same_entries(cache, theirs, padding)


def test_positions_count_on_by_themselves(models):
    model = models["deepseek_v3"]
    ids, _, _ = prompt(1, 20)
    _, cache = run(model, ids[:, :12])
    logits, _ = run(model, ids[:, 12:], cache=cache)
    assert relative_error(logits, stock(model, ids)[0]) < 2e-5


def test_a_failure_leaves_the_cache_as_it_was(models):
    model = models["deepseek_v2"]
    ids, _, _ = prompt(2, 20)
    cache = paged_cache(stepper_of(model)[1], page_size=16, max_pages=2)
    with pytest.raises(CacheFullError):
        run(model, ids, cache=cache)
    assert cache.get_seq_length() == 0 and cache.pages_in_use == 0
    run(model, ids[:1, :10], cache=cache)  # another number of rows: nothing was left behind
    before = [layer.keys.clone() for layer in cache.layers]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr("deepseek_accel.generation.prefill.layer_step", fails_late())
        run(model, ids[:1, :10], cache=cache, tokens=3)
    assert [layer.get_seq_length() for layer in cache.layers] == [10] * 3
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))
    with pytest.raises(ValueError, match="holds 1 sequences"):
        run(model, ids, cache=cache)


def fails_late():
    """A layer step that runs out of memory in the last of three layers, in the second piece."""
    calls = itertools.count()

    def step(*arguments):
        if next(calls) == 5:
            raise RuntimeError("out of memory")
        return layer_step(*arguments)

    return step


def test_decoding_goes_on_after_a_prefill(models):
    """The pages are those the optimized model reads."""
    model = models["deepseek_v3"]
    ids, _, _ = prompt(2, 21)
    with torch.no_grad():
        expected = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    logits, cache = run(model, ids, tokens=7)
    produced = [logits.argmax(-1)]
    for _ in range(7):
        logits, cache = run(model, produced[-1][:, None], cache=cache)
        produced.append(logits.argmax(-1))
    assert torch.equal(torch.stack(produced, 1), expected[:, 21:])


class Largest(TorchDispatchMode):
    """The most bytes that tensors made under it take at once, `known` ones apart."""

    def __init__(self, known):
        super().__init__()
        self.held, self.most, self.seen = 0, 0, {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage):
        if storage.data_ptr() in self.seen or storage.nbytes() == 0:
            return
        self.seen.add(storage.data_ptr())
        self.held += storage.nbytes()
        self.most = max(self.most, self.held)
        weakref.finalize(storage, self.drop, storage.data_ptr(), storage.nbytes())

    def drop(self, pointer, size):
        self.seen.discard(pointer)
        self.held -= size


@pytest.mark.parametrize("name", FAMILIES)
def test_memory_is_bounded_however_long_the_prompt(models, name, monkeypatch):
    monkeypatch.setattr("deepseek_accel.generation.prefill.MIN_TOKENS", 16)
    model, bound = models[name], 400_000
    stepper, optimized = stepper_of(model)
    per_token = 16 * 16  # ids and angles, of the whole prompt at once
    for count in (400, 1600):
        ids, _, _ = prompt(1, count)
        cache = paged_cache(optimized, page_size=16, reserve_tokens=count)
        with Largest([*model.parameters(), *model.buffers()]) as largest:
            prefill(stepper, ids, cache, activation_bytes=bound)
        assert tokens_per_piece(stepper.model.layers[-1], bound) < count // 2
        assert largest.most - cache.bytes_reserved() < 1.4 * bound + per_token * count


def test_long_rows_are_cut_where_attention_has_a_plan():
    """Whatever the prompt's length, all pieces but the last are of one length."""
    for count in (40_000, 163_840):
        lengths = [tokens.stop - tokens.start for _, tokens in pieces(1, count, 30_000)]
        assert set(lengths[:-1]) == {CUDNN_PIECE} and sum(lengths) == count
    assert len(list(pieces(1, 30_000, 30_000))) == 1


@pytest.mark.parametrize("batch, count, block", [(1, 10, 3), (5, 4, 9), (3, 7, 7), (2, 1, 1), (4, 1000, 256)])
def test_pieces_cover_the_prompt_in_order(batch, count, block):
    seen = torch.zeros(batch, count, dtype=torch.int)
    for rows, tokens in pieces(batch, count, block):
        assert (rows.stop - rows.start) * (tokens.stop - tokens.start) <= block
        assert (seen[rows, : tokens.start] == 1).all()  # a row's earlier keys are there
        seen[rows, tokens] += 1
    assert (seen == 1).all()
