"""Class device on real GPUs: models split over two, models on a GPU that is not the current one, GPU and CPU mixed."""

import copy

import pytest
import torch
from accelerate import dispatch_model

from deepseek_accel import optimize, report, restore
from deepseek_accel.testing import assert_accurate, tiny_model

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
needs_one = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NEW_TOKENS = 20
# Larger than the tiny models' own. With seed 6 the tokens vary and every choice has a margin above 5e-3.
SIZES = {
    "deepseek_v3": dict(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=48, head_dim=16),
    "llama": dict(hidden_size=128),
}


@pytest.fixture(autouse=True)
def exact_matmuls():
    """fp32 matmuls in fp32, so that tokens can be compared; current device 0 before and after."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed
    if torch.cuda.is_available():
        assert torch.cuda.current_device() == 0


def make(model_type, dtype=torch.float32):
    return tiny_model(model_type, seed=6, num_hidden_layers=4, **SIZES[model_type]).to(dtype)


def prompts(rows=1, length=23):
    return torch.randint(2, 128, (rows, length), generator=torch.Generator().manual_seed(0))


def run(model, ids, device="cuda:0", **kwargs):
    """Tokens and logits of greedy generation, on the CPU."""
    out = model.generate(
        ids.to(device),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **{key: value.to(device) for key, value in kwargs.items()},
    )
    assert torch.cuda.current_device() == 0
    return out.sequences.cpu()[:, ids.shape[1] :], torch.stack([step.cpu() for step in out.logits], 1)


@torch.no_grad()
def forced(model, ids, tokens):
    """Logits of `tokens` after `ids`, one call without a cache."""
    return model(torch.cat((ids, tokens), 1), use_cache=False).logits[:, ids.shape[1] - 1 : -1]


def split(model, places):
    """`places`: the device of each of the four layers; the ends go with the first and the last."""
    device_map = {f"model.layers.{i}": place for i, place in enumerate(places)}
    device_map |= {"model.embed_tokens": places[0], "model.rotary_emb": places[0]}
    device_map |= {"model.norm": places[-1], "lm_head": places[-1]}
    return dispatch_model(model, device_map, main_device=next(p for p in places if p != "cpu"))


def check(model_type, place, ids, device="cuda:0", orders=("optimize last", "optimize first"), **kwargs):
    """A placed and optimized model against the unpatched one on a single device, in either order."""
    stock = make(model_type)
    expected, expected_logits = run(copy.deepcopy(stock).to("cuda:0"), ids, **kwargs)
    assert len(set(expected.flatten().tolist())) >= 6, "repetition would hide faults"
    for order in orders:
        model = copy.deepcopy(stock)
        model = place(optimize(model)) if order == "optimize first" else optimize(place(model))
        for _ in range(2):  # the second call reuses whatever the first compiled or kept
            actual, logits = run(model, ids, device, **kwargs)
            torch.testing.assert_close(logits, expected_logits, rtol=1e-3, atol=1e-3)
            assert torch.equal(actual, expected)
        counters = report(model).counters
        assert counters["kv_cache: paged generate calls"] == 2 and not report(model).warnings()
        actual, _ = run(restore(model), ids, device, **kwargs)
        assert torch.equal(actual, expected)
    return counters


@needs_two
@pytest.mark.parametrize("places", [(0, 0, 1, 1), (1, 1, 0, 0), (0, 1, 0, 1)], ids=str)
@pytest.mark.parametrize("model_type", SIZES)
def test_V01_model_split_over_two_gpus(model_type, places):
    """Layers on cuda:1 while the current device is cuda:0: a launch fails, or reads through peer access."""
    counters = check(model_type, lambda m: split(m, places), prompts(), f"cuda:{places[0]}")
    fast = "attention: absorbed" if model_type == "deepseek_v3" else "attention: paged"
    assert counters[fast] > 0


@needs_two
@pytest.mark.parametrize("model_type", SIZES)
def test_V01_split_model_with_a_padded_batch(model_type):
    """Block tables, lengths and masks must follow each layer to its device."""
    ids = prompts(rows=3)
    mask = torch.ones_like(ids)
    mask[1, :14] = 0
    mask[2, :22] = 0
    check(model_type, lambda m: split(m, (0, 0, 1, 1)), ids, attention_mask=mask)


@needs_two
@pytest.mark.parametrize("model_type", SIZES)
def test_V01_beams_on_a_split_model(model_type):
    """Beam search reorders the pages of every device, not of the first only."""
    stock = make(model_type)
    options = dict(max_new_tokens=10, num_beams=4, do_sample=False)
    expected = copy.deepcopy(stock).to("cuda:0").generate(prompts().to("cuda:0"), **options).cpu()
    model = optimize(split(copy.deepcopy(stock), (0, 0, 1, 1)))
    assert torch.equal(model.generate(prompts().to("cuda:0"), **options).cpu(), expected)


@needs_two
@pytest.mark.parametrize("model_type", SIZES)
def test_V01_model_on_a_gpu_that_is_not_current(model_type):
    """The whole model on cuda:1 and the current device left 0: "cannot be accessed from Triton (cpu tensor?)"."""
    check(model_type, lambda m: m.to("cuda:1"), prompts(), "cuda:1")


@needs_two
@pytest.mark.parametrize("model_type", SIZES)
def test_V01_two_models_on_two_gpus_in_turns(model_type):
    """What is kept per process (tables, options, scratch) belongs to the device of the first model."""
    stock = make(model_type)
    expected, _ = run(copy.deepcopy(stock).to("cuda:0"), prompts())
    models = {device: optimize(copy.deepcopy(stock).to(device)) for device in ("cuda:0", "cuda:1")}
    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        assert torch.equal(run(models[device], prompts(), device)[0], expected)
    moved = models["cuda:0"].to("cuda:1")  # an optimized model moved later
    assert torch.equal(run(moved, prompts(), "cuda:1")[0], expected)


@needs_two
@pytest.mark.parametrize("model_type", SIZES)
def test_V01_bf16_split_model_is_as_accurate(model_type):
    """bf16, where the kernels run on tensor cores: the error of the split model is the unpatched one's, times two."""
    stock = make(model_type, torch.bfloat16)
    exact = copy.deepcopy(stock).double()
    if model_type == "deepseek_v3":
        exact.set_experts_implementation("eager")
    ids = prompts()
    theirs, their_logits = run(copy.deepcopy(stock).to("cuda:0"), ids)
    ours, our_logits = run(optimize(split(copy.deepcopy(stock), (0, 0, 1, 1))), ids)
    if model_type == "llama":  # a router in bf16 flips choices, which no bound on rounding covers
        exact_ours, exact_theirs = forced(exact, ids, ours), forced(exact, ids, theirs)
        error = (their_logits.double() - exact_theirs).abs().max()
        assert (our_logits.double() - exact_ours).abs().max() <= 2 * error
    else:
        assert_accurate(our_logits[:, 0], their_logits[:, 0], forced(exact, ids, ours)[:, 0])


@needs_one
@pytest.mark.parametrize("places", [(0, 0, "cpu", "cpu"), (0, "cpu", 0, 0)], ids=str)
@pytest.mark.parametrize("model_type", SIZES)
def test_V01_gpu_and_offloaded_layers(model_type, places):
    """Layers kept on the CPU and run on the GPU: weights are on "meta" between calls, pages must be on the GPU."""
    ends = dict(zip(range(4), places, strict=True))
    device_map = {f"model.layers.{i}": place for i, place in ends.items()}
    device_map |= dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), 0)
    check(model_type, lambda m: dispatch_model(m, device_map, main_device=0), prompts())


@needs_one
@pytest.mark.parametrize("model_type", SIZES)
def test_V01_layers_that_run_on_the_cpu(model_type):
    """One model, layers on a GPU and layers that compute on the CPU: each op chooses by its own tensors."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    def place(model):
        model.to("cuda:0")
        model.model.layers[2].to("cpu")
        add_hook_to_module(
            model.model.layers[2],
            AlignDevicesHook(execution_device="cpu", io_same_device=True, skip_keys=["cache", "past_key_values"]),
        )
        return model

    check(model_type, place, prompts())
