"""Speculative decoding on a GPU, in graphs and without: the stock model's tokens, whatever rows and lengths."""

import pytest
import torch

from deepseek_accel import models, optimize, report
from deepseek_accel.ops.choice import why_not_triton
from deepseek_accel.passes import DEFAULTS
from deepseek_accel.testing import tiny_model

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if reason := why_not_triton(torch.device("cuda", torch.cuda.current_device())):
    pytest.skip(reason, allow_module_level=True)

NEW = 40


def passes(graphs, draft=None, number=3):
    chosen = {name: {} for name in DEFAULTS if graphs or name != "cuda_graphs"}
    chosen |= {"kv_cache": {"page_size": 16}, "allow_skips": True}
    if graphs:
        chosen["cuda_graphs"] = {"batch_sizes": (1, 2, 4, 8)}
    return chosen if draft is None else chosen | {"speculative": {"draft": draft, "num_draft_tokens": number}}


def near(model_type, dtype=torch.float32, graphs=True):
    """A draft that is right now and then: the model with noise on its head."""
    draft = tiny_model(model_type)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        draft.lm_head.weight.add_(0.03 * torch.randn(draft.lm_head.weight.shape, generator=generator))
    return optimize(draft.to("cuda", dtype), passes(graphs))


def optimized(model_type, mode, graphs=True, number=3, dtype=torch.float32):
    draft = near(model_type, dtype, graphs) if mode == "model" else mode
    return optimize(tiny_model(model_type).to("cuda", dtype), passes(graphs, draft, number))


def batch(*lengths, seed=0):
    """Random prompts, left-padded with 0. Their halves repeat, so that n-grams are found."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in zip(ids, lengths, strict=True):
        half = torch.randint(2, 128, (-(-length // 2),), generator=generator)
        row[max(lengths) - length :] = torch.cat((half, half))[:length]
    return {"input_ids": ids.cuda(), "attention_mask": (ids != 0).long().cuda()}


def run(model, inputs, **options):
    return model.generate(**inputs, **{"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, **options})


def counted(model, what):
    return sum(number for name, number in report(model).counters.items() if what in name)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("mode", ["ngram", "model", "self"])
@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "llama"])
def test_tokens_are_stocks(model_type, mode, graphs):
    """Rows of the bucket and fewer, other lengths and numbers of tokens, the first ones again (open case G01)."""
    if mode == "self" and model_type == "llama":
        pytest.skip("no experts")
    stock, ours = tiny_model(model_type).cuda(), optimized(model_type, mode, graphs)
    cases = [(23,), (23, 9, 1), (40, 33, 20, 7, 1), (23,), tuple(range(1, 40, 5)), (130, 23)]
    for turn in range(2):
        for seed, lengths in enumerate(cases):
            inputs = batch(*lengths, seed=seed + 10 * turn)
            expected = run(stock, inputs)
            assert torch.equal(run(ours, inputs), expected), (lengths, turn)
            eos = expected[0, max(lengths) + 7].item()
            assert torch.equal(run(ours, inputs, eos_token_id=eos), run(stock, inputs, eos_token_id=eos))
    assert counted(ours, "speculative: accepted tokens") > 0
    if graphs:
        assert counted(ours, "speculative runs replayed") > counted(ours, "speculative: steps") // 2


def test_the_mtp_layer():
    stock, tokenizer = models.load_tiny(dtype=torch.float32, device="cuda")
    texts = [tokenizer(text, add_special_tokens=False).input_ids[:200] for text in models.heldout_documents()]
    texts = [ids for ids in texts if len(ids) == 200][1:4]
    for graphs in (True, False):
        ours, _ = models.load_tiny(dtype=torch.float32, device="cuda")
        optimize(ours, passes(graphs, "mtp", 4))
        for ids in (torch.tensor(texts[:1]).cuda(), torch.tensor(texts).cuda()) * 2:
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            assert torch.equal(run(ours, inputs, max_new_tokens=64), run(stock, inputs, max_new_tokens=64))
        steps = counted(ours, "speculative: rows in steps")
        assert counted(ours, "speculative: accepted tokens") > steps  # more than one of four


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_pages(dtype):
    """Graphs and launches write and read the same bytes."""
    config = {"kv_cache": {"page_size": 16, "dtype": dtype}}
    pair = [
        optimize(tiny_model("deepseek_v3").cuda(), passes(graphs, near("deepseek_v3", graphs=graphs)) | config)
        for graphs in (True, False)
    ]
    for seed in range(3):
        assert torch.equal(*(run(model, batch(23, 9, seed=seed)) for model in pair))


def test_bf16_follows_plain_decoding_up_to_its_noise():
    """Where the texts part, the plain one's two best scores are closer than bf16 can tell (open case P04)."""
    plain = optimize(tiny_model("deepseek_v3").to("cuda", torch.bfloat16), passes(True))
    ours = optimized("deepseek_v3", "model", dtype=torch.bfloat16)
    for seed in range(6):
        options = {"return_dict_in_generate": True, "output_logits": True}
        expected = run(plain, batch(23, seed=seed), **options)
        got = run(ours, batch(23, seed=seed))
        differs = (got != expected.sequences)[0].nonzero()
        if len(differs):
            best = expected.logits[int(differs[0]) - 23][0].float().topk(2).values
            assert best[0] - best[1] < 0.05 * best[0].abs(), (seed, best)


def test_sampling_repeats_and_two_models_share_nothing():
    ours, other = optimized("deepseek_v3", "model"), optimized("llama", "ngram")
    texts = []
    for _ in range(3):
        torch.manual_seed(5)
        texts.append(run(ours, batch(23, 9), do_sample=True, temperature=0.9, top_k=20).tolist())
        run(other, batch(23, 9))
    assert texts[0] == texts[1] == texts[2]


def test_a_longer_context_than_the_table_holds():
    stock, ours = (
        tiny_model("llama", max_position_embeddings=64).cuda(),
        tiny_model("llama", max_position_embeddings=64),
    )
    optimize(ours.cuda(), passes(True, "ngram", 3))
    for length in (20, 20, 200, 200, 20):
        inputs = batch(length, seed=length)
        assert torch.equal(run(ours, inputs), run(stock, inputs))
