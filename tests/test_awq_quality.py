"""What four bits cost on the bundled model: AWQ against rounding to nearest, on text neither has seen."""

import inspect
import json.decoder
import tarfile
import textwrap
import zipfile

import pytest
import torch
import torch.nn.functional as F

from deepseek_accel import MixedPrecision, calibrate_awq, models, optimize, restore

WINDOWS = 5
"""Of 1,024 tokens each, spread over the held-out text."""


def calibration_texts():
    """Source files of the standard library, none of them among the held-out ones."""
    texts = [inspect.getsource(module) for module in (tarfile, json.decoder, textwrap, zipfile)]
    assert not set(texts) & set(models.heldout_documents())
    return [text[i : i + 3000] for text in texts for i in range(0, min(len(text), 12000), 3000)]


@torch.no_grad()
def log_probabilities(model, windows):
    return torch.cat([model(w[:, :-1], use_cache=False).logits[0].log_softmax(-1) for w in windows])


@pytest.mark.slow
def test_awq_costs_less_than_rounding_to_nearest(capsys):
    model, tokenizer = models.load_tiny(dtype=torch.float32)
    ids = torch.tensor(
        [t for text in models.heldout_documents() for t in (0, *tokenizer(text, verbose=False).input_ids)]
    )
    windows = ids.unfold(0, 1025, len(ids) // WINDOWS - 300)[:WINDOWS, None]
    targets = torch.cat([w[0, 1:] for w in windows])
    exact = log_probabilities(model, windows)
    calibration = calibrate_awq(model, calibration_texts(), tokenizer=tokenizer)
    perplexity, divergence = {"16 bits": F.nll_loss(exact, targets).exp().item()}, {}
    for name, config in {
        "rtn": MixedPrecision(method="rtn"),
        "awq": MixedPrecision(calibration=calibration),
    }.items():
        optimize(model, [config])
        ours = log_probabilities(model, windows)
        restore(model)
        perplexity[name] = F.nll_loss(ours, targets).exp().item() / perplexity["16 bits"] - 1
        divergence[name] = (exact.exp() * (exact - ours)).sum(-1).mean().item()
    with capsys.disabled():
        print(f"\nperplexity {perplexity}, divergence {divergence}")
        for row in calibration.rows:
            print({key: value for key, value in row.items() if key != "rescaled"})
    assert divergence["awq"] < 0.85 * divergence["rtn"]
    assert perplexity["awq"] < 0.025
    assert all(row["output_snr_db"] > 16 and row["weight_kl"] < 0.03 for row in calibration.rows)
