"""An optimized model in transformers' own `pipeline`: nothing about the pipeline changes.

python examples/pipeline_dropin.py
"""

from typing import Any

import torch
from transformers import pipeline

from deepseek_accel import optimize, report
from deepseek_accel.models import load_tiny

PROMPTS = ["import os\n\ndef ", "class Parser:\n", "for key, value in "]


def main() -> None:
    model, tokenizer = load_tiny(dtype=torch.float32)
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options: dict[str, Any] = dict(max_new_tokens=16, do_sample=False, batch_size=len(PROMPTS))

    stock = write(PROMPTS, **options)
    optimize(model)  # in place: the pipeline holds the same model
    ours = write(PROMPTS, **options)

    for (result,) in ours:
        print(repr(result["generated_text"]))
    print("texts equal:", ours == stock)
    print("paged generate calls:", report(model).counters["kv_cache: paged generate calls"])


if __name__ == "__main__":
    main()
