"""What `optimize` did to a model, and what has happened since."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, field
from typing import Any

from .plan import format_rows, html_rows


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_short, value))
    return f"{value:.2f}" if isinstance(value, float) else "-" if value is None else str(value)


@dataclass(frozen=True, repr=False)
class Report:
    """The state of one model. `print(report(model))` shows it; `to_dict()` is ready for JSON."""

    model_type: str
    optimized: bool
    passes: list[dict[str, Any]] = field(default_factory=list)
    """One row per pass: pass, status, effect, edits, skipped, notes."""
    parameter_bytes_before: int = 0
    parameter_bytes: int = 0
    cache: dict[str, Any] = field(default_factory=dict)
    """What one token takes in one layer of the cache, and how it is stored."""
    gating: dict[str, Any] = field(default_factory=dict)
    """How many of the chosen experts a token kept and a step read, where a pass drops some; None: nothing ran."""
    counters: dict[str, int] = field(default_factory=dict)
    """How often each path ran since `optimize`, as "<pass>: <what happened>"."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def warnings(self) -> list[str]:
        """Applied passes that have not run yet."""
        used = {key.partition(":")[0] for key, count in self.counters.items() if count}
        return [
            f"{row['pass']} was applied but has not run yet"
            for row in self.passes
            if row["status"] != "skipped" and row["pass"] not in used
        ]

    def _facts(self) -> list[str]:
        lines = [f"parameters: {self.parameter_bytes_before:,} bytes before, {self.parameter_bytes:,} now"]
        lines += [f"cache: {key.replace('_', ' ')} {value}" for key, value in self.cache.items()]
        lines += [f"gating: {key.replace('_', ' ')} {_short(value)}" for key, value in self.gating.items()]
        lines += [f"{key}: {count:,}" for key, count in sorted(self.counters.items())]
        return lines + self.warnings()

    def __str__(self) -> str:
        if not self.optimized:
            return f"{self.model_type}: not optimized"
        return "\n".join(
            [f"{self.model_type}: optimized", format_rows(self.passes), *(f"  {line}" for line in self._facts())]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if not self.optimized:
            return f"<p>{html.escape(str(self))}</p>"
        facts = "".join(f"<li>{html.escape(line)}</li>" for line in self._facts())
        return f"<p>{html.escape(self.model_type)}: optimized</p>{html_rows(self.passes)}<ul>{facts}</ul>"
