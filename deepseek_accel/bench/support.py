"""The table of docs/support.md: what each pass does on each family. `python -m deepseek_accel.bench.support` shows it.

It comes from `plan` on tiny models without weights, so it says what the code does.
"""

from __future__ import annotations

from .. import families
from ..api import plan
from ..config import OptimizeConfig
from ..passes.adaptive_topk import AdaptiveTopK

BEGIN, END = "<!-- families -->", "<!-- /families -->"


def support_table() -> str:
    """Markdown: one row per family, one column per pass; "applied", or why not."""
    import torch
    from transformers import AutoModelForCausalLM

    from ..testing import tiny_config

    # of the lossy ones that which needs no data of the model's own to be planned
    config = OptimizeConfig((*OptimizeConfig.lossless().passes, AdaptiveTopK(method="threshold")), allow_skips=True)
    names = [p.name for p in config.ordered()]
    lines = ["| family | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for name in families.known():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config(name))
        steps = plan(model, config).steps
        cells = []
        for step in steps.values():
            reasons = sorted({skip.why for skip in step.skips})
            cells.append("; ".join(reasons) if reasons and not step.edits else step.status)
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(support_table())
