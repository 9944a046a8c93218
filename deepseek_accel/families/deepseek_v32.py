"""DeepSeek-V3.2: V3 with a sparse indexer that picks the visible keys. Its cache also holds indexer keys."""

from ..versions import v32_caches_latents
from .deepseek_v3 import DeepseekV3


class DeepseekV32(DeepseekV3):
    def why_no_attention(self) -> str | None:
        return None if v32_caches_latents() else "transformers before 5.24 caches expanded keys for this family"


FAMILY = DeepseekV32("deepseek_v32", attention="mla", extra_cache="indexer keys")
