"""Class q-load: experts that the calibration text never reaches."""

import torch

from deepseek_accel import MixedPrecision, calibrate_awq, optimize
from deepseek_accel.quantization import rounding
from deepseek_accel.quantization.blocks import parameter
from deepseek_accel.testing import tiny_model

GROUP = 32


def test_experts_that_met_nothing_are_rounded_to_nearest():  # L01: 64 experts, one sample of five tokens
    model = tiny_model("deepseek_v3", n_routed_experts=64)
    tokens = torch.randint(2, 128, (1, 5), generator=torch.Generator().manual_seed(0))
    calibration = calibrate_awq(model, [tokens], group_size=GROUP)
    assert all(row["experts_hit"] == 0 and row["experts"] == 64 for row in calibration.rows[1:])
    for name in calibration.names:
        weight = parameter(model, name).detach()
        codes, scales, _ = calibration.quantize(name, weight)
        assert torch.isfinite(scales).all() and (scales > 0).all()
        if weight.dim() == 3:
            expected = [rounding.nearest(w, GROUP, torch.float16) for w in weight]
            assert torch.equal(codes, torch.stack([e[0] for e in expected]))
            assert torch.equal(scales, torch.stack([e[1] for e in expected]))


def test_every_expert_then_computes_as_well_as_if_rounded_to_nearest():  # L01: each is forced
    errors = {}
    hidden = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    chosen, share = torch.arange(64)[:, None], torch.ones(64, 1)
    for method in ("awq", "rtn"):
        model = tiny_model("deepseek_v3", n_routed_experts=64)
        tokens = torch.randint(2, 128, (1, 5), generator=torch.Generator().manual_seed(0))
        calibration = calibrate_awq(model, [tokens], group_size=GROUP) if method == "awq" else None
        with torch.no_grad():
            exact = model.model.layers[1].mlp.experts(hidden, chosen, share)
            optimize(model, [MixedPrecision(group_size=GROUP, method=method, calibration=calibration)])
            actual = model.model.layers[1].mlp.experts(hidden, chosen, share)
        errors[method] = (actual - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert (errors["rtn"] < 0.35).all()
    assert (errors["awq"] <= 1.2 * errors["rtn"]).all()  # scales are of fp16, those of an fp32 model of fp32
