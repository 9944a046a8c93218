"""The table of docs/support.md: what each pass does on each family. `python -m deepseek_accel.bench.support` shows it.

It comes from `plan` on tiny models without weights, so it says what the code does.
"""

from __future__ import annotations

from .. import families, passes
from ..api import plan
from ..config import OptimizeConfig

BEGIN, END = "<!-- families -->", "<!-- /families -->"


def support_table() -> str:
    """Markdown: one row per family, one column per pass; "applied", or why not."""
    import torch
    from transformers import AutoModelForCausalLM

    from ..testing import tiny_config

    lines = [
        "| family | " + " | ".join(passes.PASSES) + " |",
        "|---|" + "---|" * len(passes.PASSES),
    ]
    for name in families.known():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config(name))
        asked_for = [passes.load(pass_name)() for pass_name in passes.ASKED_FOR]
        steps = plan(model, OptimizeConfig((*OptimizeConfig.lossless().passes, *asked_for), allow_skips=True)).steps
        cells = []
        for step in steps.values():
            reasons = sorted({skip.why for skip in step.skips})
            cells.append("; ".join(reasons) if reasons and not step.edits else step.status)
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(support_table())
