"""A PEFT adapter on an optimized model: train it, save it, generate with it, merge it, undo the optimization.

The saved adapter is PEFT's own, and gives a stock model the same text. While gradients are wanted, and while
`kv_b_proj` carries an adapter, attention runs as Hugging Face wrote it; the report counts both. After the merge the
projection is a plain matrix again and decoding is absorbed.

    python examples/lora_adapter.py
"""

from __future__ import annotations

import importlib.util
import tempfile
from typing import Any

import torch

from deepseek_accel import optimize, report, restore
from deepseek_accel.models import heldout_documents, load_tiny

TARGETS = ["q_b_proj", "kv_b_proj", "o_proj"]


def train(model: Any, tokens: torch.Tensor, steps: int) -> list[float]:
    """Losses of `steps` steps on the same tokens [B, S]."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def attention_counts(model: Any) -> dict[str, int]:
    return {name: count for name, count in report(model).counters.items() if name.startswith("attention:")}


def on_a_stock_model(adapter: Any, prompt: dict[str, Any]) -> torch.Tensor:
    """What the adapter, saved and loaded, makes of a model that was never optimized."""
    from peft import PeftModel

    base, _ = load_tiny(dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        adapter.save_pretrained(folder)
        stock = PeftModel.from_pretrained(base, folder).eval()
    return stock.generate(**prompt)


def main() -> None:
    if importlib.util.find_spec("peft") is None:
        print("skipped: peft is not installed; `pip install peft`")
        return
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base, tokenizer = load_tiny(dtype=torch.float32)
    model = get_peft_model(optimize(base), LoraConfig(r=4, target_modules=TARGETS))
    tokens = tokenizer(heldout_documents()[0][:600], return_tensors="pt").input_ids
    print("losses:", *(f"{loss:.4f}" for loss in train(model, tokens, steps=2)))

    model.eval()
    prompt: dict[str, Any] = dict(inputs=tokens[:, :16], attention_mask=torch.ones_like(tokens[:, :16]))
    prompt |= dict(max_new_tokens=16, do_sample=False)
    adapted = model.generate(**prompt)
    print("with the adapter:", attention_counts(model))

    print("tokens equal on a stock model:", torch.equal(on_a_stock_model(model, prompt), adapted))

    merged = model.merge_and_unload()
    ours = merged.generate(**prompt)
    print("after the merge: ", attention_counts(merged))
    print("tokens equal after merging:", torch.equal(ours, adapted))

    restore(merged)
    stock = merged.generate(**prompt)
    print("tokens equal after restore:", torch.equal(ours, stock))


if __name__ == "__main__":
    main()
