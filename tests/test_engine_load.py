"""Two thousand requests with random lengths, cancellations and injected failures: none lost, none mixed up."""

import random
import resource
import threading

import pytest
import torch
from processors import Broken, processing

from deepseek_accel import optimize
from deepseek_accel.engine import Engine
from deepseek_accel.testing import tiny_model

NUM_REQUESTS = 2000
LONGEST = 60


class Watching:
    def __init__(self):
        self.tokens, self.results, self.pages, self.others = {}, {}, [], []

    def token(self, request, count, when):
        self.tokens[request.id] = self.tokens.get(request.id, 0) + count

    def finished(self, request, result):
        assert request.id not in self.results
        self.results[request.id] = result

    def step(self, facts):
        self.pages.append(facts.pages_in_use)

    def submitted(self, request):
        self.others.append(request.id)

    admitted = preempted = submitted


def reference(model, prompts, length):
    """The greedy continuations of all prompts, from plain `generate` with equal lengths together."""
    found = {}
    for size in sorted({len(prompt) for prompt in prompts}):
        batch = [prompt for prompt in prompts if len(prompt) == size]
        ids = torch.tensor(batch)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length)
        found |= {tuple(prompt): row[size:].tolist() for prompt, row in zip(batch, out, strict=True)}
    return found


@pytest.mark.slow
def test_two_thousand_requests():
    model = optimize(tiny_model("deepseek_v3", num_hidden_layers=2), {"attention": {}, "experts": {}, "layers": {},
                     "kv_cache": {"page_size": 16}})  # fmt: skip
    draw = random.Random(5)
    kinds = [[draw.randrange(2, 128) for _ in range(draw.randrange(1, 60))] for _ in range(150)]
    right = reference(model, kinds, LONGEST)
    plans = []
    for _ in range(NUM_REQUESTS):
        fate = draw.choices(["whole", "cancelled", "broken", "drawn"], [75, 10, 5, 10])[0]
        length = draw.randrange(1, draw.choice([12, LONGEST]))
        plans.append((draw.choice(kinds), length, fate, draw.randrange(0, 12)))
    requests, watching = {}, Watching()
    with Engine(model, max_batch=24, max_pages=30, observer=watching) as engine:

        def submit(part):
            for i in part:
                prompt, length, fate, after = plans[i]
                options = {"max_new_tokens": length, "do_sample": fate == "drawn"}
                if fate == "broken":
                    options |= processing(Broken(after))
                requests[i] = engine.submit(prompt, seed=i, **options)
                if fate == "cancelled" and after % 2:
                    requests[i].cancel()

        threads = [threading.Thread(target=submit, args=(range(i, NUM_REQUESTS, 4),)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i, (_, _, fate, after) in enumerate(plans):
            if fate == "cancelled" and not after % 2:
                for _ in zip(requests[i], range(after), strict=False):
                    pass
                requests[i].cancel()
        half = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        results = {i: request.result(120) for i, request in requests.items()}
        facts = engine.facts()
        reserved = facts["bytes_reserved"]
        assert facts["running"] == facts["waiting"] == facts["pages_of_rows"] == 0
        assert facts["pages_in_use"] == facts["pages_kept"] <= 30
        again = engine.generate([plans[i][0] for i in range(200)], max_new_tokens=LONGEST, do_sample=False)
        assert engine.facts()["bytes_reserved"] == reserved  # nothing grew
        preemptions = engine.facts()["preemptions"]
    assert len(results) == NUM_REQUESTS
    for i, (prompt, length, fate, after) in enumerate(plans):
        result, expected = results[i], right[tuple(prompt)]
        assert result.num_prompt_tokens == len(prompt)
        if fate == "whole":
            assert (result.error, result.finish_reason, result.tokens) == (None, "length", expected[:length])
        elif fate == "broken":
            assert result.tokens == expected[: min(length, after)]
            assert (result.finish_reason == "error") == (after < length)
        elif fate == "cancelled":
            assert result.error is None
            assert result.tokens == expected[: len(result.tokens)]
            assert result.finish_reason == ("cancelled" if len(result.tokens) < length else "length")
        else:
            assert (result.error, len(result.tokens)) == (None, length)
        assert watching.results[result.id] is result
        assert watching.tokens.get(result.id, 0) == len(result.tokens) == len(result.token_times)
    assert preemptions > 0
    assert max(watching.pages) <= 30
    assert [each.tokens for each in again] == [right[tuple(plans[i][0])] for i in range(200)]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - half < 64 * 1024  # KiB
