"""docs/support.md says what `plan` says."""

from pathlib import Path

import pytest

from deepseek_accel.bench.support import BEGIN, END, support_table
from deepseek_accel.versions import v32_caches_latents


@pytest.mark.skipif(not v32_caches_latents(), reason="the page is about the newest supported transformers")
def test_the_page_is_current():
    page = (Path(__file__).parents[1] / "docs" / "support.md").read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == support_table()
