"""Whole optimized models on a GPU: the same tokens as stock in fp32, and within the accuracy rule in bf16."""

import pytest
import torch

from deepseek_accel import optimize, report, restore
from deepseek_accel.testing import FAMILIES, assert_accurate, relative_error, tiny_model
from deepseek_accel.versions import cache_argument, v32_caches_latents

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

IDS = torch.randint(2, 128, (4, 23), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
for row, padding in enumerate((0, 14, 22, 5)):
    MASK[row, :padding] = 0


def generate(model, **kwargs):
    options = dict(max_new_tokens=64, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True)
    return model.generate(IDS.cuda(), attention_mask=MASK.cuda(), **options | kwargs)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_tokens_equal_stock(family, implementation):
    if family == "deepseek_v32" and not v32_caches_latents():
        pytest.skip("V3.2 on this transformers keeps its own attention, which is wrong for padded rows")
    model = tiny_model(family, attn_implementation=implementation).cuda()
    expected = generate(model)
    beams = generate(model, num_beams=3, max_new_tokens=10)
    optimize(model)
    ours = generate(model)
    assert torch.equal(ours.sequences, expected.sequences)
    for logits, stock in zip(ours.logits, expected.logits, strict=True):
        assert relative_error(logits, stock) < 1e-4
    assert torch.equal(generate(model, num_beams=3, max_new_tokens=10).sequences, beams.sequences)
    counters = report(model).counters
    if family in ("deepseek_v2", "deepseek_v3"):
        assert counters["layers: fused step"] > 0
    elif family != "deepseek_v32":
        assert counters["attention: paged"] > 0
    restore(model)
    assert torch.equal(generate(model).sequences, expected.sequences)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["deepseek", "deepseek_v2", "deepseek_v3", "llama", "qwen2"])
def test_half_precision_is_as_accurate_as_stock(family, dtype):
    """Ten teacher-forced decoding steps; every step's logits against float64."""
    from deepseek_accel.cache import paged_cache

    def decode(model, make_cache):
        cache = make_cache()
        with torch.no_grad():
            out = [model(IDS[:1, :13].to(model.device), **{cache_argument(): cache}, use_cache=True).logits[:, -1:]]
            for i in range(13, 23):
                step = model(IDS[:1, i : i + 1].to(model.device), **{cache_argument(): cache}, use_cache=True)
                out.append(step.logits)
        return torch.cat(out, 1).float().cpu()

    from transformers import DynamicCache

    model = tiny_model(family)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the other forms reject float64
    exact = decode(model.double(), lambda: DynamicCache(config=model.config))
    model = tiny_model(family).to("cuda", dtype)
    stock = decode(model, lambda: DynamicCache(config=model.config))
    optimize(model)
    ours = decode(model, lambda: paged_cache(model))
    assert_accurate(ours, stock, exact)


def test_repeats_are_bit_equal():
    model = optimize(tiny_model("deepseek_v3").to("cuda", torch.bfloat16))
    first = generate(model)
    for _ in range(5):
        again = generate(model)
        assert torch.equal(again.sequences, first.sequences)
        assert all(torch.equal(a, b) for a, b in zip(again.logits, first.logits, strict=True))
