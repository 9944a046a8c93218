"""Prefill on a GPU: stock's greedy tokens, kernels against their references, and the memory of a very long prompt."""

import pytest
import torch

from deepseek_accel import families, optimize
from deepseek_accel.cache import paged_cache
from deepseek_accel.generation.lines import read_model
from deepseek_accel.generation.prefill import prefill
from deepseek_accel.generation.step import Stepper
from deepseek_accel.ops.choice import why_not_triton
from deepseek_accel.ops.prefill_attention import merge, prefill_attention, prefill_attention_reference, whole_keys
from deepseek_accel.ops.prefill_write import CASES, case_inputs, prefill_write, prefill_write_reference
from deepseek_accel.testing import relative_error

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if reason := why_not_triton(torch.device("cuda", 0)):
    pytest.skip(reason, allow_module_level=True)

V2_LITE = dict(
    vocab_size=10240, hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=2,
    num_attention_heads=16, num_key_value_heads=16, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
    n_group=1, topk_group=1, topk_method="greedy", first_k_dense_replace=1, routed_scaling_factor=1.0,
    kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, head_dim=64,
    max_position_embeddings=163840, eos_token_id=None, pad_token_id=0, bos_token_id=1,
)  # fmt: skip


def v2_lite(dtype):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("deepseek_v2", **V2_LITE)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return model


def stepper_of(model):
    optimize(model)
    family = families.find(model)
    return Stepper(read_model(model, family), family, family.attentions(model)[0])


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_greedy_tokens_are_stocks(dtype):
    """fp32: equal. bf16: stock's choice, or as good as it by less than the two differ in rounding."""
    model = v2_lite(dtype)
    ids = torch.randint(2, 10000, (2, 1024), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :300] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    stock = model(ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, use_cache=False).logits[:, -1]
    starts = torch.tensor([0, 300], dtype=torch.int32, device="cuda")
    stepper = stepper_of(model)
    ours = [prefill(stepper, ids, paged_cache(model), starts, positions) for _ in range(5)]
    assert all(torch.equal(logits, ours[0]) for logits in ours)
    if dtype == torch.float32:
        assert relative_error(ours[0], stock) < 1e-4
        assert torch.equal(ours[0].argmax(-1), stock.argmax(-1))
    best = stock.float().max(-1).values
    chosen = stock.float().gather(1, ours[0].argmax(-1, keepdim=True))[:, 0]
    assert (best - chosen <= 2 * (ours[0].float() - stock.float()).abs().amax(-1)).all()


@pytest.mark.parametrize("count", [32_768, 163_840])
def test_memory_of_long_prompts(count):
    """Above weights and cache: 2 GiB for 32,768 tokens, and no more than the ids and angles of the rest beyond."""
    model = v2_lite(torch.bfloat16)
    stepper = stepper_of(model)
    ids = torch.randint(2, 10000, (1, count), device="cuda")
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cache = paged_cache(model, reserve_tokens=count)
    assert prefill(stepper, ids, cache).isfinite().all()
    peak = torch.cuda.max_memory_allocated() - base - cache.bytes_reserved()
    assert peak <= (2 << 30) + 1024 * (count - 32_768)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_entries(case, dtype):
    ours, expected = (case_inputs(case, dtype, "cuda") for _ in range(2))
    prefill_write(*ours)
    prefill_write_reference(*expected)
    for index in (0, 1, 7):
        assert torch.equal(ours[index].isnan(), expected[index].isnan())
        if ours[index].numel():
            error = relative_error(ours[index].nan_to_num(), expected[index].nan_to_num())
            assert error < (1e-5 if dtype == torch.float32 else 2e-2)


def test_long_parts_merge():
    """Keys of the length that cuDNN takes, with a rest that it does not: whole, and in parts."""
    dtype, piece = torch.bfloat16, 16384
    torch.manual_seed(0)
    both = torch.randn(1, piece + 1000, 4, 256, device="cuda", dtype=dtype)
    shared = torch.randn(1, piece + 1000, 64, device="cuda", dtype=dtype)
    query = torch.randn(1, piece, 4, 192, device="cuda", dtype=dtype)
    key, value, scale = both[..., :128], both[..., 128:], 192**-0.5
    concatenated = torch.cat((key, shared.unsqueeze(2).expand(*key.shape[:3], -1)), -1)
    assert torch.equal(whole_keys(key, shared), concatenated)

    def parts():
        for part in (slice(0, piece), slice(piece, None)):
            yield prefill_attention(query, key[:, part], value[:, part], scale, k_shared=shared[:, part], causal=False)

    outs = [merge(parts()) for _ in range(50)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    rows = torch.tensor([0, 1, 127, 128, 9000, piece - 1], device="cuda")
    expected = prefill_attention_reference(query[:, rows], key, value, scale, k_shared=shared, causal=False)
    assert relative_error(outs[0][:, rows], expected.out) < 2e-2
