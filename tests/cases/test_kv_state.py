"""Nothing of one call may reach another: not the next one, not one in another thread."""

import gc
import threading

import pytest
import torch
from support import MODELS, A, B, config, fast, generate, greedy, left_pad, logits, prompt, stock
from transformers import LogitsProcessor, LogitsProcessorList

from deepseek_accel import optimize
from deepseek_accel.cache import PagedCache
from deepseek_accel.testing import tiny_model


class Stumble(LogitsProcessor):
    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 4:
            raise ZeroDivisionError("on purpose")
        return scores


@pytest.mark.parametrize("model_type", MODELS)
def test_K15_calls_do_not_see_each_other(model_type):
    """A position kept on a module: a bare forward, or an earlier generate, shifts the next call."""
    model, plain = optimize(tiny_model(model_type), config()), stock(model_type)
    expected = {name: greedy(plain, ids, new=8)[0].tolist() for name, ids in (("A", A), ("B", B))}
    batch = left_pad(A, B, prompt(5))

    def check(name, ids):
        assert greedy(optimize(tiny_model(model_type), config()), ids, new=8)[0].tolist() == expected[name]
        assert greedy(model, ids, new=8)[0].tolist() == expected[name]

    check("A", A)
    logits(model, B)
    logits(model, A[:, :5], use_cache=False)
    check("B", B)
    check("A", A)
    assert greedy(model, *batch, new=8)[0].tolist() == greedy(plain, *batch, new=8)[0].tolist()
    check("A", A)
    stumble = Stumble()
    with pytest.raises(ZeroDivisionError):
        generate(model, A, max_new_tokens=8, logits_processor=LogitsProcessorList([stumble]))
    assert stumble.calls == 4
    check("A", A)


def tracked(*types):
    return [x for x in gc.get_objects() if type(x) in types]


@pytest.mark.parametrize("model_type", MODELS)
def test_K15_no_keys_stay_behind(model_type):
    """Keys and values kept alive by the model after the outputs are gone."""
    model = optimize(tiny_model(model_type), config())
    gc.collect()
    before = {id(x) for x in tracked(torch.Tensor, PagedCache)}
    out = greedy(model, A, new=8)
    values = logits(model, B)
    del out, values
    gc.collect()
    left = [x for x in tracked(torch.Tensor, PagedCache) if id(x) not in before]
    assert not [x for x in left if type(x) is PagedCache]
    # the rotary table of the last step may stay; keys or latents of the prompt, or a page of them, are larger
    assert not [x.shape for x in left if x.dim() >= 3 and x.numel() > 128], "keys or latents outlived the call"


@pytest.mark.parametrize("model_type", MODELS)
def test_K15_the_cache_goes_with_the_last_reference(model_type):
    """Without a collection: no reference cycle may hold the pages until the garbage collector happens to run."""
    model = optimize(tiny_model(model_type), config())
    generate(model, A, max_new_tokens=2)
    gc.collect()
    gc.disable()
    try:
        generate(model, A, max_new_tokens=4)
        assert not tracked(PagedCache)
    finally:
        gc.enable()


def race(*jobs):
    """Runs the jobs at once and returns their results in order; an exception in one is raised here."""
    results, gate = [None] * len(jobs), threading.Barrier(len(jobs))

    def run(i, job):
        gate.wait()
        try:
            results[i] = job()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i, job)) for i, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
def test_K16_two_threads(model_type):
    """Two requests on one model at once: one overwrites or deletes the other's state."""
    model = fast(model_type)
    expected = [greedy(stock(model_type), ids, new=20)[0].tolist() for ids in (A, B)]
    for _ in range(5):
        got = race(lambda: greedy(model, A, new=20)[0].tolist(), lambda: greedy(model, B, new=20)[0].tolist())
        assert got == expected


@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
def test_K16_one_speculates(model_type):
    """A speculative request rolls its cache back while a plain one runs."""
    model = fast(model_type)
    draft = optimize(tiny_model(model_type, num_hidden_layers=2), config())
    expected = [greedy(stock(model_type), ids, new=20)[0].tolist() for ids in (A, B)]

    def speculative():
        return generate(model, A, max_new_tokens=20, assistant_model=draft)[:, A.shape[1] :].tolist()

    def lookup():
        return generate(model, A, max_new_tokens=20, prompt_lookup_num_tokens=3)[:, A.shape[1] :].tolist()

    for _ in range(3):
        for drafted in (speculative, lookup):
            assert race(drafted, lambda: greedy(model, B, new=20)[0].tolist()) == expected
