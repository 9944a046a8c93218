"""AWQ on a GPU: calibration there is as good as on the host, and checkpoints load straight onto it."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from deepseek_accel import MixedPrecision, calibrate_awq, load_quantized, optimize
from deepseek_accel.models import TINY, load_tiny, path
from deepseek_accel.quantization.write import write_quantized
from deepseek_accel.testing import relative_error, tiny_model

GROUP = 32
DATA = [torch.randint(2, 128, (1, n), generator=torch.Generator().manual_seed(n)) for n in (96, 64, 40)]


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids.to(model.device), use_cache=False).logits.float().cpu()


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "llama"])
def test_calibration_is_as_good_as_on_the_host(model_type):
    rows = {d: calibrate_awq(tiny_model(model_type).to(d), DATA, group_size=GROUP).rows for d in ("cpu", "cuda")}
    for host, device in zip(rows["cpu"], rows["cuda"], strict=True):
        assert device["output_snr_db"] > host["output_snr_db"] - 1


def test_peak_memory_is_the_model_and_a_layer():
    model = load_tiny(TINY)[0].cuda()
    data = [torch.randint(3, 2000, (1, 256))]
    calibrate_awq(model, data)  # libraries take their workspaces
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    calibrate_awq(model, data)
    layer = sum(p.numel() for p in model.model.layers[1].mlp.parameters())
    assert torch.cuda.max_memory_allocated() - before < 12 * 4 * layer, "fp32 copies of one layer, and its inputs"
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2**20


def test_a_checkpoint_loads_straight_onto_the_device(tmp_path):
    write_quantized(path(TINY), tmp_path / "out")
    ids = torch.randint(3, 2000, (1, 200), generator=torch.Generator().manual_seed(0))
    host = load_quantized(tmp_path / "out", dtype=torch.float32)
    before = torch.cuda.memory_allocated()
    model = load_quantized(tmp_path / "out", device="cuda")
    assert torch.cuda.memory_allocated() - before < 9_000_000  # bf16 takes 18.4 MB
    assert all(p.is_cuda for p in model.parameters()) and all(b.is_cuda for b in model.buffers())
    assert relative_error(logits(model, ids), logits(host, ids)) < 0.2
    out = model.generate(ids.cuda(), max_new_tokens=16, do_sample=False)
    assert out.shape == (1, 216)


def test_a_calibration_of_the_host_serves_a_model_on_the_device():
    calibration = calibrate_awq(tiny_model("deepseek_v3"), DATA, group_size=GROUP)
    model = tiny_model("deepseek_v3").cuda()
    expected = logits(model, DATA[0])
    optimize(model, [MixedPrecision(group_size=GROUP, calibration=calibration)])
    assert relative_error(logits(model, DATA[0]), expected) < 0.6
