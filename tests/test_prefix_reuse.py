"""`generate` with kept prefixes: the tokens of the stock model, and only what this model would compute is taken."""

import copy
import functools
import gc
import pickle
import threading
import time
import warnings
import weakref

import pytest
import torch

from deepseek_accel import CacheFullError, KVCache, PlanError, models, optimize, plan, report, restore
from deepseek_accel.cache import forget_prefixes, paged_cache
from deepseek_accel.errors import UnsupportedModelError
from deepseek_accel.generation.fingerprint import Fingerprint
from deepseek_accel.passes import DEFAULTS as PASSES
from deepseek_accel.testing import picture, tiny_model
from deepseek_accel.versions import cache_argument

CACHE = cache_argument()
MODELS = ("deepseek", "deepseek_v2", "deepseek_v3", "llama", "qwen2")
PAGE = 16


def config(**options):
    options = {"page_size": PAGE, "reuse_prefix": True, **options}
    return {name: {} for name in PASSES} | {"kv_cache": options, "allow_skips": True}


@functools.cache
def stock(model_type):
    return tiny_model(model_type)


@functools.cache
def reusing(model_type):
    return optimize(tiny_model(model_type), config())


def fresh(model_type="deepseek_v3", **options):
    return optimize(tiny_model(model_type), config(**options))


def prompt(length, rows=1, seed=0):
    return torch.randint(2, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


def run(model, ids, new=6, **options):
    mask = torch.ones_like(ids)
    return model.generate(ids, **{"attention_mask": mask, "do_sample": False, "max_new_tokens": new, **options})


def counted(model, what):
    return sum(number for name, number in report(model).counters.items() if what in name)


def taken(model):
    return counted(model, "prompt tokens taken")


def kept(model):
    return vars(model)["_accel_prefixes"]._shared


def same(model_type, ids, **options):
    """(tokens, how many of the prompt's tokens were taken); the tokens are the stock model's."""
    model = reusing(model_type)
    before = taken(model)
    runs = []
    for each in (stock(model_type), model):
        torch.manual_seed(3)
        runs.append(run(each, ids, **options))
    assert runs[1].tolist() == runs[0].tolist()
    return runs[1], taken(model) - before


# --- what is taken


@pytest.mark.parametrize("model_type", MODELS)
def test_later_prompts_begin_with_kept_pages(model_type):
    forget_prefixes(reusing(model_type))
    ids = prompt(70)
    assert same(model_type, ids)[1] == 0
    assert same(model_type, ids)[1] == 64, "the whole pages of the same prompt"
    assert same(model_type, ids[:, :64])[1] == 48, "the last token is always computed"
    assert same(model_type, ids[:, :65])[1] == 64
    longer = torch.cat([ids, prompt(30, seed=1)], 1)
    assert same(model_type, longer)[1] == 64
    assert same(model_type, longer)[1] == 96
    other = ids.clone()
    other[0, 20] = 1
    assert same(model_type, other)[1] == 16, "nothing behind the first difference"
    assert same(model_type, ids[:, 1:])[1] == 0, "the same tokens elsewhere"
    assert same(model_type, ids[:, :16])[1] == 0


@pytest.mark.parametrize("model_type", MODELS)
def test_a_conversation_takes_what_was_generated(model_type):
    model = reusing(model_type)
    forget_prefixes(model)
    answer, _ = same(model_type, prompt(20), new=30)  # the last token has no entry: 49 are held
    turn = torch.cat([answer, prompt(5, seed=2)], 1)
    assert same(model_type, turn)[1] == 48


@pytest.mark.parametrize("model_type", MODELS)
def test_a_batch_takes_what_all_rows_find(model_type):
    forget_prefixes(reusing(model_type))
    ids = prompt(50, rows=3)
    same(model_type, ids)
    assert same(model_type, ids)[1] == 3 * 48
    assert same(model_type, ids[[2, 0]])[1] == 2 * 48
    mixed = ids.clone()
    mixed[1, 20:] = prompt(30, seed=7)
    assert same(model_type, mixed)[1] == 3 * 16


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("found", [False, True], ids=["nothing kept", "some kept"])
def test_rows_that_begin_alike_are_computed_once(model_type, found):
    model = reusing(model_type)
    forget_prefixes(model)
    ids = torch.cat([prompt(40).repeat(4, 1), prompt(30, rows=4, seed=1)], 1)
    ids[3] = ids[1]  # two rows are equal
    if found:
        same(model_type, ids[:1, :20])
    before = counted(model, "shared within a batch")
    same(model_type, ids)
    # three pages begin all rows alike, or only two differ from the fourth on: 32 tokens once instead of four times,
    # then the 32 of three rows instead of four
    assert counted(model, "shared within a batch") - before == 3 * (16 if found else 32) + 32
    assert kept(model).num_caches() == 0


@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
def test_samples_of_one_prompt(model_type):
    model = reusing(model_type)
    forget_prefixes(model)
    before = counted(model, "shared within a batch")
    options = dict(num_return_sequences=3, do_sample=True, temperature=0.8, top_k=20)
    same(model_type, prompt(40, seed=4), **options)
    assert counted(model, "shared within a batch") - before == 2 * 32
    same(model_type, torch.cat([prompt(40, seed=5), prompt(40, seed=6)]), **options)
    assert counted(model, "shared within a batch") - before == 2 * 32 + 4 * 32


def test_rows_do_not_write_into_what_they_share():
    """Each row goes its own way behind a prefix that ends with a page."""
    ids = torch.cat([prompt(32).repeat(3, 1), prompt(1, rows=3, seed=1)], 1)
    forget_prefixes(reusing("deepseek_v3"))
    for _ in range(2):
        same("deepseek_v3", ids, new=40)


def test_free_pages_are_never_read():
    model = reusing("deepseek_v3")
    forget_prefixes(model)
    ids = prompt(50, rows=2)
    same("deepseek_v3", ids)
    shared = kept(model)
    keep = sorted(shared.kept._pages.values())
    for storage in shared.storages.values():
        free = torch.ones(len(storage), dtype=torch.bool)
        free[keep] = False
        assert free.any()
        storage[free] = float("nan")
    assert same("deepseek_v3", ids)[1] == 96


def test_a_cache_that_is_handed_out_may_be_cropped_and_written():
    """What it does to kept pages it does to copies."""
    model, ids = fresh(), prompt(50)
    first = run(model, ids, return_dict_in_generate=True)
    cache = first[CACHE]
    cache.crop(-(cache.get_seq_length() - 20))
    run(model, torch.cat([ids[:, :20], prompt(40, seed=3)], 1), **{CACHE: cache})
    assert run(model, ids).tolist() == first.sequences.tolist()
    assert taken(model) == 48
    twin = copy.deepcopy(cache)
    assert pickle.loads(pickle.dumps(cache)).get_seq_length() == twin.get_seq_length() == cache.get_seq_length()
    assert twin.pages_in_use == cache.pages_in_use
    cache.layers[1].reorder_cache(torch.tensor([0]))  # one layer leaves the others, and the pages it shared
    cache.reset()
    del first, cache
    assert kept(model).num_caches() == 0
    assert run(model, ids).tolist() == run(stock("deepseek_v3"), ids).tolist()


# --- what is not taken


def test_calls_that_cannot_reuse_say_why():
    model, theirs = fresh(), stock("deepseek_v3")
    ids = prompt(40, rows=2)
    run(model, ids)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    cases = {
        "padded prompts": dict(attention_mask=mask),
        "beam search": dict(num_beams=2),
        "position ids of the caller": dict(position_ids=torch.arange(1, 41)[None].expand(2, -1)),
        "prefill_chunk_size": dict(prefill_chunk_size=16),
    }
    for reason, options in cases.items():
        assert run(model, ids, **options).tolist() == run(theirs, ids, **options).tolist()
        assert counted(model, f"no prefix reuse ({reason})") == 1
    embeds = model.get_input_embeddings()(ids).detach()
    run(model, ids, inputs_embeds=embeds)
    assert counted(model, "no prefix reuse (the forward is given inputs_embeds)") == 1
    run(model, ids, **{CACHE: paged_cache(model, PAGE)})
    model.train()
    run(model, ids)
    model.eval()
    assert counted(model, "no prefix reuse (training mode)") == 1
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 2)
    run(model, ids)
    handle.remove()
    assert counted(model, "no prefix reuse (a module is hooked)") == 1
    assert taken(model) == 0
    assert run(model, ids).tolist() == run(theirs, ids).tolist()
    assert taken(model) == 2 * 32


def test_weights_that_cannot_be_watched():
    with torch.inference_mode():
        model = optimize(tiny_model("llama"), config())
        for _ in range(2):
            assert run(model, prompt(40)).tolist() == run(stock("llama"), prompt(40)).tolist()
    assert counted(model, "no prefix reuse (its weights are of a kind whose changes torch does not count)") == 2


def step(kind, **options):
    def change(model):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        kind(model.parameters(), lr=0.05, **options).step()
        model.zero_grad()

    return change


def load(assign):
    def change(model):
        other = tiny_model("deepseek_v3", seed=9).state_dict()
        model.load_state_dict(other, assign=assign)

    return change


def through_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(1.1)


def one_layer_through_data(model):
    model.model.layers[1].self_attn.kv_b_proj.weight.data.mul_(-1)


def one_row(model):
    """A write that none of the compared values shows: torch's count does."""
    row = next(token for token in prompt(60, seed=5)[0].tolist() if token % 4)  # every fourth row has one of 32 values
    with torch.no_grad():
        model.model.embed_tokens.weight[row].mul_(-20)


def swapped_data(model):
    weight = model.model.layers[1].mlp.experts.down_proj
    weight.data = -weight.data


def setting(model):
    model.model.layers[1].mlp.gate.routed_scaling_factor = 0.1
    model.model.layers[0].self_attn.scaling *= 3


CHANGES = {
    "SGD": step(torch.optim.SGD),
    "AdamW": step(torch.optim.AdamW, foreach=True),
    "fused SGD": step(torch.optim.SGD, fused=True),
    "fused AdamW": step(torch.optim.AdamW, fused=True),
    "load_state_dict": load(False),
    "load_state_dict, assigned": load(True),
    "data": through_data,
    "data of one layer": one_layer_through_data,
    "one row": one_row,
    "other data": swapped_data,
    "a number": setting,
}


def logits_of(model, ids):
    out = run(model, ids, 2, return_dict_in_generate=True, output_logits=True)
    return torch.stack(out.logits)


def check_change(model, change):
    """After `change` nothing of before is taken: the numbers are those without kept pages, and other ones."""
    ids = prompt(60, seed=5)
    before = logits_of(model, ids)
    assert (logits_of(model, ids) - before).abs().max() < 1e-4
    hits = taken(model)
    change(model)
    after = logits_of(model, ids)
    forget_prefixes(model)
    truth = logits_of(model, ids)
    assert (after - truth).abs().max() < 1e-4
    assert (before - truth).abs().max() > 1e-2
    assert taken(model) == hits


@pytest.mark.parametrize("what", CHANGES)
def test_changed_weights_take_nothing_of_before(what):
    model = fresh()
    check_change(model, CHANGES[what])


@pytest.mark.parametrize("where", ["instance", "class"])
def test_other_functions_take_nothing_of_before(where, monkeypatch):
    """Of a module that our loop then leaves to transformers: what it computed before is not what it computes now."""
    model, ids = fresh("deepseek_v3"), prompt(40)
    run(model, ids)
    mlp = model.model.layers[0].mlp

    def doubled(self_or_x, *rest):
        x = rest[0] if rest else self_or_x
        return 2 * mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))

    if where == "class":
        monkeypatch.setattr(type(mlp), "forward", doubled)
    else:
        mlp.forward = doubled
    expected = tiny_model("deepseek_v3")
    if where == "instance":
        expected.model.layers[0].mlp.forward = doubled
    before = taken(model)
    assert torch.equal(run(model, ids), run(expected, ids))
    assert taken(model) == before


def test_a_mask_of_another_length():
    """All ones and longer than the ids: transformers drops it and remembers its length; nothing is taken then."""
    model, ids = fresh("llama"), prompt(40)
    run(model, ids)
    mask = torch.ones(1, 45, dtype=torch.long)
    outcomes = []
    for each in (stock("llama"), model):
        try:
            outcomes.append(each.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6).tolist())
        except Exception as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]
    assert taken(model) == 0


def test_another_dtype_takes_nothing_of_before():
    model, ids = fresh("llama"), prompt(60, seed=5)
    run(model, ids)
    model.double()
    for hits in (0, 48):
        assert run(model, ids).tolist() == run(tiny_model("llama").double(), ids).tolist()
        assert taken(model) == hits


def test_a_weight_written_while_a_call_runs_keeps_nothing():
    """What a call computed with two versions of a weight belongs to neither."""
    model = fresh("llama")

    class Writes:
        def put(self, tokens):
            with torch.no_grad():
                model.lm_head.weight.mul_(1.0)

        def end(self):
            pass

    run(model, prompt(20), 40, streamer=Writes())
    assert len(kept(model).kept) <= 1  # the prompt's page, complete before the first write


@pytest.fixture(scope="module")
def adapted():
    """(model, its PEFT wrapper) with two adapters."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = fresh()
    names = ["kv_a_proj_with_mqa", "o_proj"]
    options = dict(r=4, lora_alpha=32, target_modules=names, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks the model by an old name
        wrapped = peft.get_peft_model(model, peft.LoraConfig(**options))
        wrapped.add_adapter("other", peft.LoraConfig(**options))
    return model, wrapped.eval()


def test_adapters(adapted):
    """Each adapter finds its own pages again; no page is taken under another one."""
    model, wrapped = adapted
    ids = prompt(60, seed=5)

    def truth():
        forget_prefixes(model)
        return logits_of(wrapped, ids)

    expected = {}
    for name in ("default", "other"):
        wrapped.set_adapter(name)
        expected[name] = truth()
    assert (expected["default"] - expected["other"]).abs().max() > 1e-2
    with wrapped.disable_adapter():
        expected[None] = truth()
    forget_prefixes(model)
    for name, hits in (("default", 0), ("other", 0), ("default", 48), ("other", 48)):
        wrapped.set_adapter(name)
        before = taken(model)
        assert (logits_of(wrapped, ids) - expected[name]).abs().max() < 1e-3
        assert taken(model) - before == hits
    before = taken(model)
    with wrapped.disable_adapter():
        assert (logits_of(wrapped, ids) - expected[None]).abs().max() < 1e-3
    assert taken(model) == before
    wrapped.merge_adapter()
    assert (logits_of(wrapped, ids) - expected["other"]).abs().max() < 1e-3
    assert taken(model) == before
    wrapped.unmerge_adapter()
    assert (logits_of(wrapped, ids) - expected["other"]).abs().max() < 1e-3
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("other", 3.0)
    hits = taken(model)
    scaled = logits_of(wrapped, ids)
    assert taken(model) == hits
    assert (scaled - truth()).abs().max() < 1e-3
    assert (scaled - expected["other"]).abs().max() > 1e-2
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.lora_B["other"].weight.mul_(-1)
    hits = taken(model)
    trained = logits_of(wrapped, ids)
    assert taken(model) == hits
    assert (trained - truth()).abs().max() < 1e-3
    assert counted(model, "no prefix reuse") == 0


def test_a_fingerprint_holds_no_weight():
    model = tiny_model("llama")
    seen = Fingerprint(model)
    weight = weakref.ref(model.lm_head.weight)
    assert seen.is_unwritten()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert weight() is None
    assert not seen.is_unwritten()
    now = Fingerprint(model)
    assert not now.has_tensors_of(seen)
    seen.marks, seen.values = now.marks, now.values  # a new weight where the old one lay, written as often
    assert not now.has_tensors_of(seen)
    assert now.has_tensors_of(Fingerprint(model))


# --- memory


def test_no_more_is_kept_than_allowed():
    token = 3 * (32 + 8) * 4
    model = fresh(prefix_bytes=5 * PAGE * token + 7)
    for seed in range(6):
        ids = prompt(60, seed=seed)
        assert run(model, ids).tolist() == run(stock("deepseek_v3"), ids).tolist()
        facts = report(model).cache
        assert facts["kept_pages"] <= 5
        assert facts["kept_bytes"] == facts["kept_pages"] * PAGE * token
        assert facts["pool_bytes"] <= 5 * PAGE * token + 7
    run(model, prompt(60, seed=5))
    assert taken(model) == 48, "the last one is there"
    before = taken(model)
    run(model, prompt(60, seed=0))
    assert taken(model) == before, "the first one went"
    assert counted(model, "kept pages evicted") > 0


def test_kept_pages_make_room():
    model = fresh(max_pages=8)
    for seed in range(4):
        ids = prompt(100, seed=seed)
        assert run(model, ids).tolist() == run(stock("deepseek_v3"), ids).tolist()
    with pytest.raises(CacheFullError, match="max_pages is 8"):
        run(model, prompt(140))
    gc.collect()
    assert kept(model).num_caches() == 0
    assert run(model, ids).tolist() == run(stock("deepseek_v3"), ids).tolist()


def test_200_calls_leave_nothing_behind():
    model = fresh("llama", prefix_bytes=30 * PAGE * 3 * 64 * 4)
    seen = []
    gc.collect()
    gc.disable()
    try:
        for call in range(200):
            ids = torch.cat([prompt(32, seed=call % 3), prompt(call % 37 + 1, seed=call)], 1)
            run(model, ids.repeat(1 + call % 3, 1), 1 + call % 5)
            shared = kept(model)
            assert shared.num_caches() == 0, "memory waits for Python's collector"
            assert shared.pages_in_use() == len(shared.kept)
            seen.append(
                (shared.bytes_reserved(), shared.allocator.high_water, len(vars(model)["_accel_prefixes"]._states))
            )
    finally:
        gc.enable()
    assert max(seen[100:]) <= max(seen[:100])
    assert seen[-1][0] <= 30 * PAGE * 3 * 64 * 4
    assert seen[-1][2] == 1


def test_restore_gives_everything_back():
    model = tiny_model("deepseek_v3")
    before = picture(model)
    optimize(model, config())
    run(model, prompt(60))
    storage, shared = weakref.ref(kept(model).storages[0]), weakref.ref(kept(model))
    assert shared().kept_bytes() > 0
    restore(model)
    assert picture(model) == before
    assert storage() is shared() is None
    forget_prefixes(model)


def test_forgetting():
    model = fresh()
    run(model, prompt(60))
    storage = weakref.ref(kept(model).storages[0])
    forget_prefixes(model)
    assert storage() is None
    assert report(model).cache["kept_bytes"] == 0
    run(model, prompt(60))
    assert taken(model) == 0
    with pytest.raises(UnsupportedModelError):
        forget_prefixes("deepseek")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_keeps_its_own(copied):
    model = fresh()
    ids = prompt(60)
    expected = run(model, ids)
    twin = copied(model)
    with torch.no_grad():
        twin.model.layers[0].self_attn.o_proj.weight.mul_(-1)
    run(twin, ids)
    assert taken(twin) == taken(model) == 0
    assert run(model, ids).tolist() == expected.tolist()
    assert taken(model) == 48
    restore(twin)


# --- threads


def test_calls_of_several_threads():
    """Pools grow while other threads write: small reserves, many lengths, few prompts."""
    model = fresh("deepseek_v3", prefix_bytes=60 * PAGE * 480)
    prompts = [torch.cat([prompt(32, seed=i % 2), prompt(17 * i + 1, seed=i)], 1) for i in range(6)]
    expected = [run(stock("deepseek_v3"), ids, 20).tolist() for ids in prompts]
    wrong, start = [], threading.Barrier(3)

    def work(first):
        start.wait()
        for call in range(8):
            i = (first + call) % len(prompts)
            try:
                if run(model, prompts[i], 20).tolist() != expected[i]:
                    wrong.append(i)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(2 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    shared = kept(model)
    assert shared.num_caches() == 0
    assert shared.pages_in_use() == len(shared.kept) <= 60
    assert taken(model) > 0


# --- options and plan


def test_options():
    for value in (1, "yes", None):
        with pytest.raises(PlanError, match="reuse_prefix must be True or False"):
            KVCache(reuse_prefix=value)
    for value in (0, -1, 1.5, True, "1GB"):
        with pytest.raises(PlanError, match="prefix_bytes must be a positive number of bytes"):
            KVCache(reuse_prefix=True, prefix_bytes=value)
    with pytest.raises(PlanError, match="set reuse_prefix=True"):
        KVCache(prefix_bytes=100)
    assert KVCache().effect == "exact"
    assert KVCache(reuse_prefix=True).effect == "rounding"
    assert not KVCache(reuse_prefix=True).lossy


def test_nothing_is_kept_by_default():
    model = optimize(tiny_model("llama"))
    out = run(model, prompt(60), return_dict_in_generate=True)
    assert "_accel_prefixes" not in vars(model)
    assert out[CACHE].pool.table.is_alone
    assert not {name for name in report(model).cache if "kept" in name}


@pytest.mark.parametrize(
    "why, model_type, options, passes",
    [
        ("attention and layers passes", "llama", {}, {"kv_cache": {"reuse_prefix": True}}),
        ("sliding window", "qwen2", dict(sliding_window=20, use_sliding_window=True, max_window_layers=0), None),
        (
            "dynamic rotary embeddings",
            "llama",
            dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)),
            None,
        ),
    ],
)
def test_models_that_cannot_keep_prefixes(why, model_type, options, passes):
    model = tiny_model(model_type, **options)
    passes = passes or {"attention": {}, "layers": {}, "kv_cache": {"reuse_prefix": True}}
    with pytest.raises(PlanError, match=why):
        plan(model, passes)
    optimize(model, passes | {"allow_skips": True})
    assert why in str(report(model))
    assert "_accel_prefixes" not in vars(model)
    run(model, prompt(40))


def test_the_report_counts():
    model = fresh()
    run(model, prompt(60))
    run(model, prompt(60))
    text = str(report(model))
    for line in (
        "kv_cache     applied        rounding",
        "cache: kept pages 4",
        "cache: kept bytes 30720",
        "kv_cache: calls that looked for a kept prefix: 2",
        "kv_cache: calls that found a kept prefix: 1",
        "kv_cache: prompt tokens taken from kept pages: 48",
    ):
        assert line in text


# --- time


@pytest.mark.slow
def test_the_second_call_begins_at_once():
    """Bundled model, 1,920 of 2,047 prompt tokens shared. Measured in docs/kv_cache.md; this bound is generous."""
    model = models.load_tiny(dtype=torch.float32)[0]
    ids = prompt(2047) % model.config.vocab_size
    expected = run(model, ids, 1)
    optimize(model, config(page_size=64))
    run(model, prompt(2047, seed=8), 1)

    def seconds(ids):
        begin = time.perf_counter()
        out = run(model, ids, 1)
        return time.perf_counter() - begin, out

    first, tokens = seconds(ids)
    assert torch.equal(tokens, expected)
    other = ids.clone()
    other[0, 1920:] = prompt(127, seed=9)
    assert min(seconds(other)[0], seconds(ids)[0]) < 0.4 * first
    assert taken(model) >= 2 * 1920
