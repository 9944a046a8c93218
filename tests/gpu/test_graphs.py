"""`generate` through CUDA graphs: nothing of an earlier call is left in them, idle rows do nothing, memory stays.

Cases of classes graph-stale (G01, G03), graph-growth (G06), int32-overflow (I01, I03), dtype and moe-degenerate (E09,
E11), on whole models; the kernels alone are in the other files here.
"""

import copy
import functools
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from deepseek_accel import optimize, report, restore
from deepseek_accel.bench import accuracy, greedy
from deepseek_accel.cache import paged_cache
from deepseek_accel.generation.graphs import StepGraphs
from deepseek_accel.generation.prompt_graphs import size_class
from deepseek_accel.ops.choice import why_not_triton
from deepseek_accel.passes import DEFAULTS as PASSES
from deepseek_accel.testing import picture, tiny_model
from deepseek_accel.versions import cache_argument

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if reason := why_not_triton(torch.device("cuda", torch.cuda.current_device())):
    pytest.skip(reason, allow_module_level=True)
if "cuda_graphs" not in PASSES:
    pytest.skip("this version has no CUDA graphs", allow_module_level=True)

CACHE = cache_argument()
ROOT = Path(__file__).parents[2]
MODELS = ("deepseek", "deepseek_v2", "deepseek_v3", "llama", "qwen2")
two_attentions = pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])


def config(graphs=True, sizes=(1, 2, 4, 8)):
    options = {name: {} for name in PASSES if graphs or name != "cuda_graphs"}
    options |= {"kv_cache": {"page_size": 16}, "allow_skips": True}
    return options | ({"cuda_graphs": {"batch_sizes": sizes}} if graphs else {})


def fresh(model_type, dtype=torch.float32, **options):
    """A stock model on the GPU. TF32 is off by default, so that fp32 tokens can be compared."""
    return tiny_model(model_type, **options).to("cuda", dtype)


@functools.cache
def stock(model_type):
    return fresh(model_type)


@functools.cache
def eager(model_type):
    return optimize(fresh(model_type), config(graphs=False))


@functools.cache
def fast(model_type):
    return optimize(fresh(model_type), config())


def batch(*lengths, seed=0):
    """Random prompts, left-padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in zip(ids, lengths, strict=True):
        row[max(lengths) - length :] = torch.randint(2, 126, (length,), generator=generator)
    ids = ids.cuda()
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def run(model, inputs, new=10, **options):
    return model.generate(**inputs, **{"do_sample": False, "max_new_tokens": new, "pad_token_id": 0, **options})


def counted(model, what):
    return sum(number for name, number in report(model).counters.items() if what in name)


def captures(model):
    return counted(model, "cuda_graphs: captured")


def assert_replayed(model, before):
    """A test that ran without graphs shows nothing."""
    assert not {name for name in report(model).counters if "cuda_graphs: eager" in name} - before


def eager_reasons(model):
    return {name for name in report(model).counters if "cuda_graphs: eager" in name}


# --- prompts


@pytest.mark.parametrize(
    "model_type, dtype",  # in bf16 another size class may flip a router's choice
    [*((model, torch.float32) for model in MODELS), ("llama", torch.bfloat16), ("qwen2", torch.bfloat16)],
    ids=str,
)
def test_prompts_of_all_lengths(model_type, dtype):
    """A prompt in the graph of its size class, after longer and shorter ones of that class, gives what pieces give."""
    model, without = optimize(fresh(model_type, dtype), config()), optimize(fresh(model_type, dtype), config(False))
    lengths = (100, 65, 128, 1, 32, 31, 33, 64, 1000, 1024, 1025, 900, 66, 2, 129)
    for seed, length in enumerate(lengths + lengths):
        inputs = batch(length, seed=seed)
        caches = [paged_cache(each, 16) for each in (model, without)]
        options = dict(new=3, return_dict_in_generate=True, output_logits=True)
        ours, expected = (
            run(each, inputs, **options, **{CACHE: cache}) for each, cache in zip((model, without), caches, strict=True)
        )
        error = (ours.logits[0] - expected.logits[0]).abs().max() / expected.logits[0].abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 3e-2), (length, error)
        if dtype == torch.float32:
            assert torch.equal(ours.sequences, expected.sequences), length
            for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
                pages, others = one._pages().entries(), other._pages().entries()
                assert (pages - others).abs().max() <= 1e-5 * others.abs().max()
    # 1,025 tokens have no class; of the others the first prompt ran without
    classes = {size_class(length) for length in lengths} - {None}
    assert counted(model, "prompts captured") == len(classes)
    assert counted(model, "prompts replayed") == 2 * (len(lengths) - 1) - len(classes)


@two_attentions
def test_prompts_that_graphs_leave_alone(model_type):
    """Several rows, padding, and a cache that holds a beginning: pieces, and the same tokens."""
    model = fast(model_type)
    for _ in range(3):
        for lengths in ((23, 23), (23, 9)):
            assert torch.equal(run(model, batch(*lengths)), run(stock(model_type), batch(*lengths)))
        ids, tokens = batch(50)["input_ids"], []
        for each in (model, stock(model_type)):
            cache = paged_cache(model, 16) if each is model else None
            first = run(each, {"input_ids": ids[:, :20]}, 4, return_dict_in_generate=True, **{CACHE: cache})
            longer = torch.cat((first.sequences, ids[:, 20:]), 1)
            tokens.append(run(each, {"input_ids": longer}, 6, **{CACHE: first[CACHE]}))
        assert torch.equal(*tokens)


@two_attentions
@pytest.mark.parametrize("lengths", [(23,), (23, 9)])
@pytest.mark.parametrize("sample", [False, True])
def test_a_capture_finds_no_memory(model_type, lengths, sample, monkeypatch):
    """Prompt and steps run without graphs then, and from then on; the weights moved, they are tried again."""
    model, inputs = optimize(fresh(model_type), config()), batch(*lengths)
    options = dict(do_sample=True, top_k=1) if sample else {}
    expected = run(stock(model_type), inputs)

    def capture(*arguments):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(StepGraphs, "_record", capture)
        for _ in range(3):
            assert torch.equal(run(model, inputs, **options), expected)
    assert counted(model, "eager loop (out of memory)") == 3
    assert counted(model, "prompts without graph (out of memory)") == (len(lengths) == 1)
    assert torch.equal(run(model, inputs, **options), expected)
    assert captures(model) == counted(model, "replays") == counted(model, "prompts captured") == 0
    weight = model.lm_head.weight
    weight.data = weight.data.clone()
    assert torch.equal(run(model, inputs, **options), expected)
    assert captures(model) == 1


# --- graph-stale


@pytest.mark.parametrize("model_type", MODELS)
def test_G01_calls_in_any_order(model_type):
    """A graph keeps the first prompt, or the length it was captured with."""
    model, before = fast(model_type), eager_reasons(fast(model_type))
    a, b, three = batch(23), batch(9, seed=1), batch(16, 5, 1, seed=2)
    for inputs, new in ((a, 10), (b, 10), (a, 40), (three, 10), (a, 10), (three, 40), (b, 40)):
        got = run(model, inputs, new)
        assert torch.equal(got, run(stock(model_type), inputs, new))
        assert torch.equal(got, run(eager(model_type), inputs, new))
    assert captures(model) > 0
    assert_replayed(model, before)


@two_attentions
def test_G01_no_capture_for_what_differs_between_calls(model_type):
    """Prompt, length, context, batch within a bucket, end tokens: one graph for each bucket, captured once."""
    model = optimize(fresh(model_type), config())
    for lengths in ((23,), (9, 4), (9, 4, 6), (7, 7, 7, 7, 7)):
        run(model, batch(*lengths))
    warm = captures(model)
    assert warm <= 4
    for seed, lengths in enumerate([(300,), (1,), (40, 2), (3, 3, 3, 3), (5, 90, 1), (2, 3, 4, 5, 6, 7, 8, 9)]):
        inputs = batch(*lengths, seed=seed)
        end = run(stock(model_type), inputs)[0, max(lengths) + 3].item()
        for options in (dict(new=30), dict(eos_token_id=end), dict(eos_token_id=[end, 5, 6])):
            assert torch.equal(run(model, inputs, **options), run(stock(model_type), inputs, **options))
    assert captures(model) == warm


@two_attentions
def test_G01_the_cache_grows_under_a_graph(model_type):
    """More tokens than were reserved: pages move while the graph knows their old address."""
    model = fast(model_type)
    for lengths in ((23,), (9, 30)):
        inputs = batch(*lengths)
        assert torch.equal(run(model, inputs, 450), run(stock(model_type), inputs, 450))


@two_attentions
def test_G01_sampling_in_turns_with_greedy(model_type):
    """Same seed, same tokens; other settings, other tokens; and greedy is greedy again afterwards."""
    model, inputs = fast(model_type), batch(23, 9)
    expected = run(stock(model_type), inputs)
    runs = []
    for options in (dict(temperature=0.8, top_k=20), dict(temperature=1.3, top_p=0.9), dict(top_k=0)):
        for _ in range(2):
            torch.manual_seed(5)
            runs.append(run(model, inputs, do_sample=True, **options).tolist())
        assert runs[-1] == runs[-2]
        assert torch.equal(run(model, inputs), expected)
    assert len({str(tokens) for tokens in runs}) == 3
    assert torch.equal(run(model, inputs, do_sample=True, top_k=1), expected)
    torch.manual_seed(5)
    calls = [run(model, inputs, do_sample=True, top_k=0).tolist() for _ in range(2)]
    assert calls[0] != calls[1], "the second call drew the numbers of the first"


@two_attentions
def test_G01_sampled_tokens_have_the_right_odds(model_type):
    """8 x 250 draws; the second token, which a graph draws, against stock's probabilities after the likeliest first."""
    model, prompt = fast(model_type), batch(23)["input_ids"]
    with torch.no_grad():
        likeliest = stock(model_type)(prompt).logits[:, -1:].argmax(-1)
        logits = stock(model_type)(torch.cat([prompt, likeliest], 1)).logits[0, -1]
    top = (logits / 0.7).topk(8)
    odds = torch.zeros_like(logits).scatter(0, top.indices, top.values.softmax(-1))
    ids = prompt.expand(8, -1).contiguous()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    torch.manual_seed(0)
    options = dict(do_sample=True, temperature=0.7, top_k=8)
    drawn = torch.cat([run(model, inputs, 2, **options)[:, 23:] for _ in range(250)])
    second = drawn[drawn[:, 0] == likeliest.item(), 1]
    assert len(second) > 250
    seen = second.bincount(minlength=len(odds)) / len(second)
    assert (seen - odds).abs().max() < 4 * (0.25 / len(second)) ** 0.5


@two_attentions
def test_G01_weights_change_under_a_graph(model_type):
    """Written in place, exchanged, copied, restored."""
    theirs, ours = fresh(model_type), optimize(fresh(model_type), config())
    before = picture(ours)
    run(ours, batch(23))
    for exchange in (False, True):
        for model in (theirs, ours):
            generator = torch.Generator().manual_seed(1 + exchange)
            for module in (model.lm_head, model.model.layers[2].self_attn.o_proj):
                weight = (torch.randn(module.weight.shape, generator=generator) * 0.1).cuda()
                if exchange:
                    module.weight = torch.nn.Parameter(weight)
                else:
                    module.weight.data.copy_(weight)
        assert torch.equal(run(ours, batch(23)), run(theirs, batch(23))), f"{exchange=}"
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        twin.lm_head.weight.neg_()
    assert not torch.equal(run(twin, batch(23)), run(ours, batch(23)))
    assert torch.equal(run(ours, batch(23)), run(theirs, batch(23)))
    restore(ours)
    assert picture(ours).keys() == before.keys()
    assert torch.equal(run(ours, batch(23)), run(theirs, batch(23)))


@two_attentions
def test_G01_a_call_that_was_broken_off(model_type):
    class Leaves:
        count = 0

        def put(self, value):
            self.count += 1
            if self.count == 5:
                raise RuntimeError("left")

        def end(self):
            pass

    model = fast(model_type)
    with pytest.raises(RuntimeError, match="left"):
        run(model, batch(23, 9), streamer=Leaves())
    assert torch.equal(run(model, batch(9, 23)), run(stock(model_type), batch(9, 23)))


def slots_held(cache):
    """[pages, page_size] bool: the slots that hold a token of a row."""
    pool = cache._pools.all[0]
    held = torch.zeros(next(iter(pool.storages.values())).shape[:2], dtype=torch.bool)
    length = cache.get_seq_length()
    for pages in pool.table.rows:
        for at, page in enumerate(pages):
            held[page, : max(0, min(cache.page_size, length - at * cache.page_size))] = True
    return held.cuda()


@pytest.mark.parametrize("rows", [5, 3, 1])
@pytest.mark.parametrize("model_type", MODELS)
def test_G03_idle_rows_write_nowhere(model_type, rows):
    """A batch in a larger bucket: every slot that holds no token is poisoned, and still is afterwards."""
    model = fast(model_type)
    run(model, batch(*[31] * (8 if rows == 5 else 4)))  # what idle rows may remember
    inputs = batch(*[23, 9, 16, 1, 5][:rows])
    cache = paged_cache(model, 16, reserve_tokens=512)
    first = run(model, inputs, 1, return_dict_in_generate=True, **{CACHE: cache}).sequences
    storages = list(cache._pools.all[0].storages.values())
    held = slots_held(cache)
    for storage in storages:
        storage[~held] = float("nan")
    addresses = [storage.data_ptr() for storage in storages]
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
    got = run(model, {"input_ids": first, "attention_mask": mask}, 20, **{CACHE: cache})
    assert torch.equal(got, run(stock(model_type), inputs, 21))
    assert [storage.data_ptr() for storage in cache._pools.all[0].storages.values()] == addresses
    held = slots_held(cache)
    for storage in storages:
        assert torch.isfinite(storage[held]).all()
        assert torch.isnan(storage[~held]).all()


@pytest.mark.parametrize("model_type", MODELS)
def test_G03_nan_in_other_rows(model_type):
    """Rows of NaN, live or left over from the call before, reach no other row."""
    theirs, ours = fresh(model_type), optimize(fresh(model_type), config())
    for model in (theirs, ours):
        with torch.no_grad():
            model.get_input_embeddings().weight[127] = float("nan")
    eight = batch(23, 9, 16, 1, 5, 8, 8, 8)
    clean = run(theirs, batch(23, 9, 16, 1, 5))
    eight["input_ids"][5:, -1] = 127
    assert torch.equal(run(ours, eight)[:5], run(theirs, eight)[:5])
    assert torch.equal(run(ours, batch(23, 9, 16, 1, 5)), clean)
    assert torch.equal(run(ours, batch(23, 9, 16, 1, 5)), clean)


@two_attentions
def test_batches_beyond_the_largest_bucket(model_type):
    model, inputs = fast(model_type), batch(*range(3, 12))
    before = counted(model, "cuda_graphs: eager")
    assert torch.equal(run(model, inputs), run(stock(model_type), inputs))
    assert counted(model, "cuda_graphs: eager") == before + 1, "the report says when no graph is used"


# --- graph-growth


@two_attentions
def test_memory_stays_over_many_mixed_calls(model_type):
    model = optimize(fresh(model_type), config())
    generator = torch.Generator().manual_seed(0)

    def call(i):
        rows = int(torch.randint(1, 9, (), generator=generator))
        lengths = torch.randint(1, 200, (rows,), generator=generator).tolist()
        run(model, batch(*lengths, seed=i), int(torch.randint(1, 40, (), generator=generator)))

    for rows in (8, 4, 2, 1):
        run(model, batch(*[200] * rows), 40)
    for length in (30, 60, 120, 200) * 2:  # a class of prompts is captured when it is met again
        run(model, batch(length), 2)
    for i in range(5):
        call(i)
    torch.cuda.synchronize()
    held, graphs = torch.cuda.memory_allocated(), captures(model)
    for i in range(60):
        call(i)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= held + (1 << 20)
    assert captures(model) == graphs
    assert report(model).cache["graph_bytes"] >= 0
    assert report(model).cache["graphs"] == graphs + counted(model, "prompts captured")
    assert counted(model, "prompts captured") == 4


FIRST_CALL = """
    import sys, threading, torch
    from deepseek_accel import optimize
    from deepseek_accel.testing import tiny_model
    device, what = torch.device(sys.argv[1]), sys.argv[2]
    stock = tiny_model(sys.argv[3]).to(device)
    model = optimize(tiny_model(sys.argv[3]).to(device))
    ids = torch.randint(2, 128, (1, 16), generator=torch.Generator().manual_seed(0)).to(device)
    stop, others = threading.Event(), []
    if what == "thread":
        def work():
            x = torch.ones(256, 256, device=device)
            while not stop.is_set():
                others.append((x @ x)[0, 0].item())
        thread = threading.Thread(target=work)
        thread.start()
    if what == "generate":
        mine = model.generate(ids, max_new_tokens=8, do_sample=False)
        assert torch.equal(mine, stock.generate(ids, max_new_tokens=8, do_sample=False))
        print("right")
    else:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.no_grad(), torch.cuda.device(device), torch.cuda.graph(
                graph, capture_error_mode="thread_local" if what == "thread" else "global"
            ):
                out = model(ids, use_cache=False).logits
        except Exception as error:
            print("raised", type(error).__name__, str(error).splitlines()[0][:200])
        else:
            graph.replay()
            torch.cuda.synchronize(device)
            assert (out - stock(ids, use_cache=False).logits).abs().max() < 1e-3
            print("captured")
    stop.set()
    if what == "thread":
        thread.join()
        assert others and set(others) == {256.0}
    with torch.no_grad():
        mine, theirs = model(ids).logits, stock(ids).logits
    assert (mine - theirs).abs().max() < 1e-3
    tokens = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(tokens, stock.generate(ids, max_new_tokens=8, do_sample=False))
    assert torch.cuda.current_device() == 0
    print("usable")
"""


@pytest.mark.parametrize("what", ["capture", "thread", "generate"])
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_G06_the_first_call_of_a_process(device, what, tmp_path):
    """A capture of the user's own, before any kernel is built: it works, or it raises and leaves the device usable."""
    if torch.device(device).index >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    script = tmp_path / "first_call.py"
    script.write_text(textwrap.dedent(FIRST_CALL))
    for model_type in ("deepseek_v3", "llama"):
        done = subprocess.run(
            [sys.executable, str(script), device, what, model_type],
            env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.split()[0] in ("captured", "raised", "right") and done.stdout.split()[-1] == "usable"


@two_attentions
def test_a_stream_of_the_caller(model_type):
    model, side = fast(model_type), torch.cuda.Stream()
    inputs = batch(23, 9)
    expected = run(stock(model_type), inputs)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = run(model, inputs)
    second = run(model, inputs)  # right behind it, on another stream
    torch.cuda.synchronize()
    assert torch.equal(first, expected) and torch.equal(second, expected)


@two_attentions
def test_threads_share_a_model(model_type):
    """One has the graphs, the others do without; all get stock's tokens, also while one of them captures."""
    model = optimize(fresh(model_type), config())
    jobs = [batch(23, 9), batch(9, 23), batch(16), batch(5, 5, 5, seed=3)]
    expected = [run(stock(model_type), inputs, 30) for inputs in jobs]
    wrong, errors = [], []

    def work(job):
        try:
            for _ in range(4):
                if not torch.equal(run(model, jobs[job], 30), expected[job]):
                    wrong.append(job)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(job,)) for job in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and not wrong
    assert captures(model) > 0


# --- dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model_type", MODELS)
def test_half_precision_by_the_margin_rule(model_type, dtype):
    """Where tokens first differ from stock's, stock itself was undecided; chosen in the graph or on the host alike."""
    options = dict(first_k_dense_replace=3) if model_type.startswith("deepseek") else {}  # rounding chooses no expert
    theirs = fresh(model_type, dtype, **options)
    ours = optimize(fresh(model_type, dtype, **options), config())
    for lengths in ((23,), (16, 16, 16)):
        prompt = batch(*lengths)["input_ids"]
        sample = greedy.sample(theirs, prompt, 32)
        mine = greedy.sample(ours, prompt, 32)
        verdict = accuracy.compare(sample, mine, accuracy.stock_noise(theirs, prompt, sample))
        assert verdict.ok, verdict.why
        assert torch.equal(greedy.generate(ours, prompt, 32)[:, prompt.shape[1] :].cpu(), mine.tokens)
    assert captures(ours) > 0


# --- int32-overflow


@two_attentions
def test_I01_pages_beyond_2_31_elements(model_type):
    """The tokens of a graph's steps lie where a 32-bit offset wraps."""
    model = optimize(fresh(model_type, torch.float32, num_hidden_layers=2, first_k_dense_replace=2), config())
    inputs = batch(23)
    expected = run(model, inputs, 40)
    width = {"deepseek_v3": 40, "llama": 64}[model_type]
    cache = paged_cache(model, 16, reserve_tokens=(1 << 31) // width + 4096)
    first = run(model, inputs, 1, return_dict_in_generate=True, **{CACHE: cache}).sequences
    pool = cache._pools.all[0]
    assert next(iter(pool.storages.values())).numel() > 1 << 31
    allocator = pool.table.allocator  # the pages up to there are taken by nobody, so that the next ones lie beyond
    allocator.references += [1] * ((1 << 31) // (16 * width) + 1 - len(allocator.references))
    ids = torch.cat([first, expected[:, first.shape[1] : 33]], 1)
    got = run(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 30, **{CACHE: cache})
    assert max(page for row in pool.table.rows for page in row) * 16 * width > 1 << 31
    assert torch.equal(got, expected)


@pytest.mark.parametrize("vocabulary, length", [(129280, 16612), (102400, 20972)])
def test_I03_no_logits_of_the_whole_prompt(vocabulary, length):
    """Logits of every position would pass 2^31 elements: only the last one's are made."""
    options = dict(vocab_size=vocabulary, max_position_embeddings=1 << 15, num_hidden_layers=2)
    for model_type in ("deepseek_v3", "llama"):
        model = optimize(fresh(model_type, torch.bfloat16, **options), config())
        ids = torch.randint(2, vocabulary, (1, length), generator=torch.Generator().manual_seed(0)).cuda()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        tokens = run(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 3)
        peak = torch.cuda.max_memory_allocated() - before
        assert tokens.shape == (1, length + 3)
        assert peak < 2 * vocabulary * length / 4, f"{peak / 2**30:.2f} GiB: a quarter of the bf16 logits at most"


# --- moe-degenerate


@pytest.mark.parametrize("lengths", [(23,), (23, 9, 16, 1, 5)])
def test_E09_one_set_of_experts_for_every_token(lengths):
    """All tokens of all rows at the same four experts, twelve idle: the largest skew, in a graph."""
    theirs, ours = fresh("deepseek_v3"), optimize(fresh("deepseek_v3"), config())
    for model in (theirs, ours):
        for layer in model.model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias[[0, 1, 4, 5]] += 100  # of two groups, which is how many are chosen
    assert torch.equal(run(ours, batch(*lengths), 20), run(theirs, batch(*lengths), 20))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_E11_ten_runs_give_the_same_tokens_and_bits(model_type, rows):
    model = optimize(fresh(model_type, torch.bfloat16), config())
    inputs = batch(*[23, 9, 16, 1, 5][:rows])
    options = dict(output_logits=True, return_dict_in_generate=True)
    first = run(model, inputs, 64, **options)  # of a single row the prompt is not yet a graph, and is one later on
    tokens = run(model, inputs, 64)
    assert torch.equal(tokens, first.sequences)
    for _ in range(10):
        assert torch.equal(run(model, inputs, 64), tokens)
    for _ in range(3):
        again = run(model, inputs, 64, **options)
        assert all(torch.equal(one, other) for one, other in zip(again.logits, first.logits, strict=True))
