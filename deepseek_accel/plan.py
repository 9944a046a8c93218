"""A plan is data: what each pass would write, what it leaves alone and why. Making one touches nothing."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .errors import PlanError
from .journal import Original


@dataclass(frozen=True)
class Edit:
    """Write `build()` to `owner.name`. `build` runs at apply time, so planning is cheap and has no side effects."""

    owner: Any
    name: str
    build: Callable[[], Any]
    where: str
    original: Original | None = None
    """How the value that is replaced is kept, if not as it is."""


@dataclass(frozen=True)
class Skip:
    """A part of the request that does not apply. An error unless the config allows skips."""

    where: str
    why: str


@dataclass(frozen=True)
class Note:
    """Something the person should know about how a pass will run, such as the implementation it uses."""

    text: str


@dataclass
class Context:
    """What a pass is told besides the model and its family."""

    passes: tuple[Any, ...]
    """Every pass of the configuration."""
    counters: Counter[str]
    """Live counts of the optimized model. Keys are "<pass>: <what happened>"."""

    def has(self, name: str) -> bool:
        return any(p.name == name for p in self.passes)


@dataclass
class Step:
    """What one pass would do."""

    effect: str
    """"exact" (the same bits), "rounding" (the same numbers up to rounding) or "lossy"."""
    edits: list[Edit] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def add(self, item: Edit | Skip | Note) -> None:
        {Edit: self.edits, Skip: self.skips, Note: self.notes}[type(item)].append(item)  # type: ignore[attr-defined]

    def status(self, verb: str = "planned") -> str:
        """ "skipped", `verb` or "partly `verb`"; once the plan is carried out the verb is "applied"."""
        if not self.edits:
            return "skipped"
        return f"partly {verb}" if self.skips else verb


@dataclass(repr=False)
class Plan:
    """What `optimize` would do to a model: `print(plan)` shows it, a notebook shows it as a table."""

    model_type: str
    steps: dict[str, Step] = field(default_factory=dict)
    context: Context = field(default_factory=lambda: Context((), Counter()), repr=False)

    def edits(self) -> Iterator[Edit]:
        return (edit for step in self.steps.values() for edit in step.edits)

    def skips(self) -> Iterator[tuple[str, Skip]]:
        return ((name, skip) for name, step in self.steps.items() for skip in step.skips)

    def check(self, allow_skips: bool) -> None:
        """Raise PlanError if two passes write the same slot, or if something requested does not apply."""
        owners: dict[tuple[int, str], Edit] = {}
        for edit in self.edits():
            if (other := owners.setdefault((id(edit.owner), edit.name), edit)) is not edit:
                raise PlanError(
                    f"two passes write the same slot: {other.where} and {edit.where} both set `{edit.name}`. "
                    "Leave one of them out."
                )
        if not allow_skips and (skipped := [f"{name}: {skip.where}: {skip.why}" for name, skip in self.skips()]):
            raise PlanError(
                "some requested passes do not apply:\n  "
                + "\n  ".join(skipped)
                + "\nLeave them out, or pass `OptimizeConfig(passes, allow_skips=True)` to go on without them."
            )

    def rows(self, verb: str = "planned") -> list[dict[str, Any]]:
        """One row per pass, plain values only. verb: see `Step.status`."""
        return [
            {
                "pass": name,
                "status": step.status(verb),
                "effect": step.effect,
                "edits": len(step.edits),
                "skipped": [f"{skip.where}: {skip.why}" for skip in step.skips],
                "notes": [note.text for note in step.notes],
            }
            for name, step in self.steps.items()
        ]

    def __str__(self) -> str:
        if not self.steps:
            return f"plan for {self.model_type}: already optimized with this config; nothing to do"
        return f"plan for {self.model_type}\n{format_rows(self.rows())}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if not self.steps:
            return f"<p>{html.escape(str(self))}</p>"
        return f"<p>plan for {html.escape(self.model_type)}</p>{html_rows(self.rows())}"


def format_rows(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        edits = f"{row['edits']:>4} edit{'s' * (row['edits'] != 1)}"
        lines.append(f"  {row['pass']:<12} {row['status']:<14} {row['effect']:<9} {edits}")
        lines += [f"    skipped {text}" for text in row["skipped"]]
        lines += [f"    {text}" for text in row["notes"]]
    return "\n".join(lines)


def html_rows(rows: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("pass", "status", "effect", "edits", "why and how"))
    body = ""
    for row in rows:
        remarks = "<br>".join(html.escape(t) for t in [*(f"skipped {s}" for s in row["skipped"]), *row["notes"]])
        cells = [row["pass"], row["status"], row["effect"], row["edits"]]
        body += "<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in cells) + f"<td>{remarks}</td></tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
