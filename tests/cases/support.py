"""Models, prompts and comparisons that the case tests share. Tests must not change what `stock` and `fast` return."""

import functools

import torch

from deepseek_accel import optimize
from deepseek_accel.passes import DEFAULTS as PASSES
from deepseek_accel.testing import relative_error, tiny_model
from deepseek_accel.versions import cache_argument

CACHE = cache_argument()
MODELS = ("deepseek", "deepseek_v2", "deepseek_v3", "llama", "qwen2")
TOLERANCE = 1e-4  # fp32 on a CPU; the noise is below 3e-6
PAGE = 16  # prompts of 23, 9 and 1 tokens then end inside the second, inside the first and at the start of a page


def config(page_size=PAGE, **kv_cache):
    """Every lossless pass, with pages small enough that tests fill several."""
    options = {name: {} for name in PASSES}
    return options | {"kv_cache": {"page_size": page_size, **kv_cache}, "allow_skips": True}


@functools.cache
def stock(model_type, **kwargs):
    return tiny_model(model_type, **kwargs)


@functools.cache
def fast(model_type, **kwargs):
    return optimize(tiny_model(model_type, **kwargs), config())


def prompt(length, seed=0):
    """[1, length] random tokens, neither padding nor BOS."""
    return torch.randint(2, 128, (1, length), generator=torch.Generator().manual_seed(1000 * seed + length))


A, B, C = prompt(23), prompt(9), prompt(1)


def left_pad(*prompts):
    """(input_ids, attention_mask) of one batch."""
    width = max(p.shape[1] for p in prompts)
    ids = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (width - p.shape[1], 0)) for p in prompts])
    return ids, mask


def greedy(model, ids, mask=None, new=12, **kwargs):
    """(new tokens [B, new], logits [B, new, V]) of a greedy generation that no EOS ends."""
    out = generate(model, ids, mask, max_new_tokens=new, output_logits=True, return_dict_in_generate=True, **kwargs)
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1)


def generate(model, ids, mask=None, **kwargs):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, **{"do_sample": False, "pad_token_id": 0, **kwargs})


@torch.no_grad()
def logits(model, ids, **kwargs):
    """[B, S, V] of one forward."""
    return model(ids, **kwargs).logits


def assert_close(actual, expected, tolerance=TOLERANCE):
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    error = relative_error(actual, expected)
    assert error <= tolerance, f"relative error {error:.3g} exceeds {tolerance:.3g}"


def assert_decisive(tokens, step_logits):
    """A greedy run that can show a fault: no single repeated token, no near ties."""
    assert len(set(tokens.flatten().tolist())) >= min(8, tokens.shape[1])
    top = step_logits.topk(2).values
    assert (top[..., 0] - top[..., 1]).min() > 1e-3


def count(model, what):
    """How often something in `report(model).counters` ran, by a part of its name."""
    from deepseek_accel import report

    return sum(number for name, number in report(model).counters.items() if what in name)
