"""Qwen2 architecture: DeepSeek-R1-Distill-Qwen. Layers may have a sliding window."""

from typing import Any

from .base import Family


class Qwen2(Family):
    def sliding_window(self, attention: Any) -> int | None:
        return attention.sliding_window


FAMILY = Qwen2("qwen2", attention="gqa")
