"""DeepSeek-V3.2: V3 with a sparse indexer that picks the visible keys. Its cache also holds indexer keys."""

from .deepseek_v3 import DeepseekV3

FAMILY = DeepseekV3("deepseek_v32", attention="mla", extra_cache="indexer keys")
