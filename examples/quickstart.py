"""Optimize the bundled model, generate, look at the report, undo. Runs on a CPU in seconds.

python examples/quickstart.py
"""

import torch

from deepseek_accel import optimize, report, restore
from deepseek_accel.models import load_tiny

model, tokenizer = load_tiny(dtype=torch.float32)
prompt = tokenizer("import os\n\ndef ", return_tensors="pt", return_token_type_ids=False)
stock = model.generate(**prompt, max_new_tokens=32, do_sample=False)

optimize(model)
ours = model.generate(**prompt, max_new_tokens=32, do_sample=False)
print(tokenizer.decode(ours[0], skip_special_tokens=True))
print(report(model))
restore(model)

again = model.generate(**prompt, max_new_tokens=32, do_sample=False)
print("tokens equal:", torch.equal(ours, stock))
print("tokens equal after restore:", torch.equal(again, stock))
