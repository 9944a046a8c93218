"""An optimized model in transformers' own `pipeline`: nothing about the pipeline changes.

A batch of prompts is padded on the left, which the optimized model computes as the stock one does. Decoding, streamers,
sampling and `return_full_text` are the pipeline's. With your own model: `pipeline("text-generation", model=DIRECTORY,
device=0, dtype="auto")`, then `optimize(pipe.model)`.

    python examples/pipeline_dropin.py
"""

from typing import Any

import torch
from transformers import TextStreamer, pipeline

from deepseek_accel import optimize, report, restore
from deepseek_accel.models import load_tiny

PROMPTS = ["import os\n\ndef ", "class Parser:\n", "for key, value in "]


def main() -> None:
    model, tokenizer = load_tiny(dtype=torch.float32)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options: dict[str, Any] = dict(max_new_tokens=16, do_sample=False, batch_size=len(PROMPTS))

    stock = pipe(PROMPTS, **options)
    optimize(pipe.model)  # in place: the pipeline holds the same object
    ours = pipe(PROMPTS, **options)
    for (result,) in ours:
        print(repr(result["generated_text"]))
    print("texts equal:", ours == stock)
    print("paged generate calls:", report(model).counters["kv_cache: paged generate calls"])

    print("streamed: ", end="")
    pipe(PROMPTS[0], max_new_tokens=16, do_sample=False, streamer=TextStreamer(tokenizer, skip_prompt=True))
    torch.manual_seed(0)
    samples = pipe(PROMPTS[1], max_new_tokens=16, do_sample=True, top_p=0.9, num_return_sequences=2)
    print("samples:", [sample["generated_text"] for sample in samples])

    restore(pipe.model)
    print("texts equal after restore:", pipe(PROMPTS, **options) == stock)


if __name__ == "__main__":
    main()
