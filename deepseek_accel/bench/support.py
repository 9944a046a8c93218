"""The table of docs/support.md: what each pass does on each family. `python -m deepseek_accel.bench.support` shows it.

It comes from `plan` on tiny models without weights, so it says what the code does.
"""

from __future__ import annotations

from .. import families, passes
from ..api import plan
from ..config import OptimizeConfig

OPTIONS = {"mixed_precision": {"method": "rtn"}, "adaptive_topk": {"method": "threshold"}}
"""Of lossy passes that have a column: options with which they need nothing else. The others are asked for by name."""

BEGIN, END = "<!-- families -->", "<!-- /families -->"


def support_table() -> str:
    """Markdown: one row per family, one column per pass; "applied", or why not."""
    import torch
    from transformers import AutoModelForCausalLM

    from ..testing import tiny_config

    classes = {name: passes.load(name) for name in passes.PASSES}
    shown = [classes[name](**OPTIONS.get(name, {})) for name in classes if name in OPTIONS or not classes[name]().lossy]
    lines = ["| family | " + " | ".join(p.name for p in shown) + " |", "|---|" + "---|" * len(shown)]
    for name in families.known():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config(name))
        steps = plan(model, OptimizeConfig(tuple(shown), allow_skips=True)).steps
        cells = []
        for step in steps.values():
            reasons = sorted({skip.why for skip in step.skips})
            cells.append("; ".join(reasons) if reasons and not step.edits else step.status("applied"))
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(support_table())
