"""What to do. The passes are the configuration: each is a frozen dataclass whose fields are its options."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import passes
from .errors import PlanError
from .passes.base import Pass


def unknown(kind: str, name: Any, allowed: Iterable[str]) -> PlanError:
    allowed = list(allowed)
    near = difflib.get_close_matches(str(name), allowed, 1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return PlanError(f"unknown {kind} {name!r}{hint} Known: {', '.join(allowed) or 'none'}.")


def not_an_object(name: str) -> str:
    """What to write instead of a pass that is given by its name."""
    if name not in passes.PASSES:
        return str(unknown("pass", name, passes.PASSES))
    made = passes.load(name).__name__
    return f"{name!r} is not a pass but the name of one; write `{made}()`, or the mapping {{{name!r}: {{}}}}"


@dataclass(frozen=True)
class OptimizeConfig:
    """The passes to apply, and whether passes that do not fit the model may be left out.

    Raises PlanError if `passes` holds something else or the same pass twice.
    """

    passes: tuple[Pass, ...]
    allow_skips: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.passes, Pass):
            raise PlanError(f"passes must be a sequence; write `passes=({type(self.passes).__name__}(...),)`")
        given: Any = self.passes
        if not isinstance(given, Iterable) or isinstance(given, str):
            raise PlanError(f"passes must be a sequence of passes, got {given!r}")
        object.__setattr__(self, "passes", tuple(self.passes))
        for p in self.passes:
            if isinstance(p, type) and issubclass(p, Pass):
                raise PlanError(f"{p.__name__} is a class; write `{p.__name__}()`")
            if isinstance(p, str):
                raise PlanError(not_an_object(p))
            if not isinstance(p, Pass):
                raise PlanError(f"{p!r} is not a pass; passes are objects such as `KVCache()`")
        if not self.passes:
            raise PlanError("no passes given; leave `config` out for every pass that keeps the model's numbers")
        names = [p.name for p in self.passes]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise PlanError(f"the same pass is given twice: {', '.join(twice)}. Give each pass once.")

    @classmethod
    def lossless(cls) -> OptimizeConfig:
        """Every pass that keeps the model's numbers up to rounding, with its defaults; what does not fit is skipped."""
        return cls(tuple(p for p in (passes.load(n)() for n in passes.DEFAULTS) if not p.lossy), allow_skips=True)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> OptimizeConfig:
        """From `{"kv_cache": {"page_size": 32}, "attention": {}, "allow_skips": false}`: pass name to its options.

        Raises PlanError on unknown names, with the nearest known one.
        """
        if not isinstance(options, Mapping):
            raise PlanError(f"options must be a mapping of pass names to their options, got {type(options).__name__}")
        chosen: dict[str, Pass] = {}
        for name, fields in options.items():
            if name == "allow_skips":
                if not isinstance(fields, bool):
                    raise PlanError(f"allow_skips must be true or false, got {fields!r}")
                continue
            if name not in passes.PASSES:
                raise unknown("pass", name, (*passes.PASSES, "allow_skips"))
            if not isinstance(fields, Mapping):
                raise PlanError(f"the options of {name!r} must be a mapping ({{}} for the defaults), got {fields!r}")
            pass_class = passes.load(name)
            allowed = [f.name for f in dataclasses.fields(pass_class)]
            for field in fields:
                if field not in allowed:
                    raise unknown(f"option of {name!r}", field, allowed)
            chosen[name] = pass_class(**fields)
        return cls(tuple(chosen[n] for n in passes.PASSES if n in chosen), bool(options.get("allow_skips", False)))

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> OptimizeConfig:
        """From a JSON text, or the path of a JSON file."""
        text = str(source)
        if not text.lstrip().startswith("{"):
            try:
                text = Path(text).read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                shown = text if len(text) < 80 else text[:77] + "..."
                why = (
                    "no such file" if isinstance(error, FileNotFoundError) else f"cannot read ({type(error).__name__})"
                )
                raise PlanError(f"{why}: {shown!r}. Pass a JSON text or the path of a JSON file.") from error
        try:
            options = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"not valid JSON: {error}") from error
        return cls.from_dict(options)

    @classmethod
    def of(cls, config: Any) -> OptimizeConfig:
        """Whatever `optimize` accepts as its config."""
        if config is None:
            return cls.lossless()
        if isinstance(config, OptimizeConfig):
            return config
        if isinstance(config, Mapping):
            return cls.from_dict(config)
        if isinstance(config, Pass):
            return cls((config,))
        if isinstance(config, Iterable) and not isinstance(config, str):
            return cls(tuple(config))
        hint = "" if not isinstance(config, str) else ". For a JSON text or file, `OptimizeConfig.from_json(...)`."
        kinds = "an OptimizeConfig, a pass, a sequence of passes, a mapping or None"
        raise PlanError(f"config must be {kinds}, got {type(config).__name__}{hint}")

    def to_dict(self) -> dict[str, Any]:
        """The mapping `from_dict` reads; where a draft is a model, its class is named instead."""
        options: dict[str, Any] = {p.name: p.options() for p in self.passes}
        return options | ({"allow_skips": True} if self.allow_skips else {})

    def ordered(self) -> list[Pass]:
        """The passes in the order they are applied."""
        return sorted(self.passes, key=lambda p: passes.PASSES.index(p.name))
