"""`bench stress` on a GPU: the same checks, bf16 and fp32, and memory."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from deepseek_accel.bench import stress  # noqa: E402
from deepseek_accel.bench.loads import Mix  # noqa: E402
from deepseek_accel.bench.shapes import load  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_points(dtype):
    subject = load("tiny", torch.device("cuda", torch.cuda.current_device()), dtype)
    options = stress.Options(
        model="tiny", mix=Mix.named("fixed", 200, 24), users=(1, 4, 16), requests=32, stock=True, split=(256,),
        breakdown=1000,
    )  # fmt: skip
    result = stress.run(options, subject=subject)
    for row in result["rows"]:
        assert row["status"] == "ok" and row["answered"] == 32, row["detail"]
        assert row["new_tokens"] == 32 * 24 and row["peak_bytes_above_weights"] > 0 and row["stock_ratio"] > 0
        if dtype == torch.float32:
            assert row["detail"] == f"3/3 as generate, {row['users']}/{row['users']} as stock's"
    assert result["split"][0]["prefill_ms"] > 0 and result["breakdown"]["prefill_ms"] > 0


def test_open_loop_of_mixed_lengths():
    subject = load("tiny", torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
    options = stress.Options(
        model="tiny", mix=Mix.named("chat", 64, 24), load="open", users=(), rates=(50.0,), windows=(0.0, 20.0),
        requests=64,
    )  # fmt: skip
    for row in stress.run(options, subject=subject)["rows"]:
        assert row["status"] == "ok" and row["answered"] == 64, row["detail"]
