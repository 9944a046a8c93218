"""FP8 entries: the numbers against their definition, ops and kernels (in Triton's interpreter) against plain pages."""

import pytest
import torch
from interpreter import interpret
from test_gqa_attention import in_float64

from deepseek_accel.kernels.entry_layout import grouped_layout, latent_layout
from deepseek_accel.ops import entry_write, gqa_attention, latent_write, mla_attention, prefill_write
from deepseek_accel.ops.fp8 import (
    CODES,
    LARGEST,
    LEAST_SCALE,
    decode_heads,
    decode_latents,
    dequantize,
    encode_heads,
    encode_latents,
    quantize,
)
from deepseek_accel.testing import relative_error

KINDS = ["e4m3", "e5m2"]
STEP = {"e4m3": 2**-4, "e5m2": 2**-3}
"""Largest error of a normal number, relative to itself: half a unit in the last place."""


def vectors(dtype=torch.float32, rows=60, width=96):
    """Of every size the dtype has, with numbers from the largest down to 2**-20 of it, and one vector of zeros."""
    generator = torch.Generator().manual_seed(0)
    info = torch.finfo(dtype)
    sizes = torch.logspace(-37 if dtype != torch.float16 else -7, 37 if dtype != torch.float16 else 3, rows)
    values = torch.randn(rows, width, generator=generator) * torch.exp2(-20 * torch.rand(rows, width))
    values = (values * sizes[:, None]).clamp(info.min / 8, info.max / 8).to(dtype)
    values[7] = 0
    return values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_are_the_nearest_numbers(kind, dtype):
    """Against a search through all 256 numbers of the format, in float64."""
    values = vectors(dtype)
    codes, scales = quantize(values, kind)
    numbers = torch.arange(256, dtype=torch.uint8).view(CODES[kind]).double()
    numbers = numbers[numbers.isfinite()]
    exact = values.double() / torch.where(scales == 0, 1.0, scales).double()
    best = (exact[..., None] - numbers).abs().amin(-1)
    error = (exact - codes.view(CODES[kind]).double()).abs()
    # the quotient is rounded to fp32 before the nearest code is chosen
    assert (error <= best + exact.abs() * 2**-23).all()
    largest = values.float().abs().amax(-1)
    assert torch.equal(scales[:, 0] == 0, largest == 0) and (scales[7] == 0).all()
    # the largest number has the largest code, but in vectors so small that the scale is as small as can be
    usual = scales[:, 0] > LEAST_SCALE
    assert usual.sum() > 50 and (codes.view(CODES[kind]).float().abs().amax(-1)[usual] == LARGEST[kind]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_within_half_a_step(kind):
    values = vectors()
    back = dequantize(*quantize(values, kind), kind, torch.float64)
    size = (values.double().abs().amax(-1, keepdim=True) / LARGEST[kind]).clamp(min=LEAST_SCALE)
    least = torch.finfo(CODES[kind]).tiny * size
    allowed = STEP[kind] * torch.maximum(values.double().abs(), least)
    assert ((back - values.double()).abs() <= allowed * (1 + 1e-6)).all()
    assert (back[7] == 0).all()
    # once rounded, always the same: what is read from a page can be written again
    again = dequantize(*quantize(back.float(), kind), kind, torch.float64)
    assert relative_error(again, back) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_ties_go_to_the_even_code(kind):
    half, largest = STEP[kind], LARGEST[kind]
    for value, rounded in ((1 + half, 1.0), (1 + 3 * half, 1 + 4 * half), (-1 - half, -1.0)):
        codes, scale = quantize(torch.tensor([largest, value]), kind)
        assert scale == 1 and codes.view(CODES[kind]).float().tolist() == [largest, rounded]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible(kind, bad):
    values = torch.randn(3, 16)
    values[1, 4] = bad
    back = dequantize(*quantize(values, kind), kind, torch.float32)
    assert back[1].isnan().all() and back[[0, 2]].isfinite().all()


def test_layouts():
    """DeepSeek's latents take 656 bytes; parts begin at multiples of 16 whatever the sizes."""
    assert latent_layout(512, 64, 2) == (512, 640, 656)
    assert latent_layout(40, 12, 4) == (48, 96, 112)
    assert grouped_layout(8, 128, 128) == (1024, 2048, 2112)
    assert grouped_layout(3, 24, 40) == (80, 208, 240)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_entries_hold_their_parts(kind, dtype):
    """Each part comes back as if it were alone, and the rotary key bit for bit."""
    generator = torch.Generator().manual_seed(1)
    latent, k_rope = (torch.randn(2, 3, size, generator=generator).to(dtype) for size in (40, 12))
    rows = encode_latents(latent, k_rope, kind)
    assert rows.dtype == torch.uint8 and rows.shape[-1] == latent_layout(40, 12, dtype.itemsize).width
    both = decode_latents(rows, kind, 40, 12, dtype)
    assert torch.equal(both[..., 40:], k_rope)
    assert torch.equal(both[..., :40], dequantize(*quantize(latent, kind), kind, dtype))
    keys, values = (torch.randn(2, 5, 3, size, generator=generator).to(dtype) * 9 for size in (24, 40))
    back = decode_heads(encode_heads(keys, values, kind), kind, 3, 24, 40, dtype)
    for part, whole in zip(back, (keys, values), strict=True):
        assert torch.equal(part, dequantize(*quantize(whole, kind), kind, dtype))


# Attention: over FP8 pages it is attention over the decoded pages.


def coded(inputs, kind):
    """(inputs with FP8 pages, the same with the pages decoded again)."""
    storage, fp8, plain = inputs["storage"], dict(inputs, fp8=kind), dict(inputs)
    if "latent_rank" in inputs:
        rank = inputs["latent_rank"]
        latent, k_rope = storage[..., :rank], storage[..., rank:]
        fp8["storage"] = encode_latents(latent, k_rope, kind)
        plain["storage"] = decode_latents(fp8["storage"], kind, rank, k_rope.shape[-1], storage.dtype, torch.float64)
    else:
        heads, value_dim = inputs["num_kv_heads"], inputs["value_dim"]
        sizes = (heads, storage.shape[-1] // heads - value_dim, value_dim)
        keys, values = storage.split([heads * sizes[1], heads * value_dim], -1)
        keys, values = keys.unflatten(-1, (heads, -1)), values.unflatten(-1, (heads, -1))
        fp8["storage"] = encode_heads(keys, values, kind)
        back = decode_heads(fp8["storage"], kind, *sizes, torch.float64)
        plain["storage"] = torch.cat([part.flatten(-2) for part in back], -1)
    return fp8, in_float64(plain)


ATTENTION = {
    "mla": (mla_attention, mla_attention.latent_attention, mla_attention.latent_attention_reference),
    "gqa": (gqa_attention, gqa_attention.paged_gqa_attention, gqa_attention.paged_gqa_attention_reference),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ATTENTION)
def test_reference_decodes(attention, kind, monkeypatch):
    module, op, reference = ATTENTION[attention]
    for case in module.CASES:
        fp8, plain = coded(module.case_inputs(case, torch.float32), kind)
        assert relative_error(op(**fp8), reference(**plain)) < 2e-6
    monkeypatch.setattr(f"deepseek_accel.ops.{attention}_attention.key_spans", lambda lengths, starts: None)
    assert relative_error(op(**fp8), reference(**plain)) < 2e-6


def _half(kind, factor):
    """bf16 queries of GPUs that convert FP8 by themselves. Rotary parts are zero: the interpreter's bf16 product is
    wrong."""
    from deepseek_accel.kernels.combine import LaunchOptions
    from deepseek_accel.kernels.mla_attention import plan

    case = mla_attention.LatentCase((1, 17, 40), 16, heads=6, rank=64, rope=16, splits=2)
    inputs = mla_attention.case_inputs(case, torch.bfloat16)
    inputs["q_latent"] = inputs["q_latent"] * factor
    inputs["q_rope"] = torch.zeros_like(inputs["q_rope"])
    inputs["scale"] /= factor
    fp8, plain = coded(inputs, kind)
    options = {"num_splits": 2, "capability": (9, 0), "pdl": False, "options": LaunchOptions(16, 16, 4, 2)}
    out, launches = plan(**fp8, **options)
    assert launches[0].arguments["HALF"] and launches[0].arguments["NATIVE"]
    for launch in launches:
        launch.run()
    return relative_error(out, mla_attention.latent_attention_reference(**plain))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [1.0, 2.0**-60, 2.0**60])
def test_bf16_queries_as_fp16_numbers(kind, factor):
    """Of any size: fp16 holds neither 2^60 nor 2^-60."""
    assert interpret(_half, kind, factor) < 5e-3


def test_two_programs_on_a_processor():
    """Only small row blocks that decode get shorter blocks of keys, and only where there are programs enough."""
    pytest.importorskip("triton")
    from deepseek_accel.kernels.combine import launch_options

    sizes = {"page_size": 64, "key_width": 576, "value_width": 512, "element_size": 2}
    few, many = (launch_options((9, 0), 16, **sizes, fp8_width=512, crowded=crowded) for crowded in (False, True))
    assert few[:3] == (16, 64, 8) and many == (16, 32, 4, 3)
    for rows, fp8_width in ((16, 0), (32, 512), (48, 512)):
        options = [launch_options((9, 0), rows, **sizes, fp8_width=fp8_width, crowded=each) for each in (False, True)]
        assert options[0] == options[1]


MLA, GQA = mla_attention.LatentCase, gqa_attention.GroupedCase
CASES_OF = {
    "mla": [
        MLA((0, 1, 17, 40), 16, splits=2),  # around a page, with an empty row, in parts
        MLA((31, 17), 16, rank=96, rope=8, splits=2),  # padded columns, a rotary key below the smallest tile
        MLA((70, 40, 33), 16, queries=2, starts=(35, 7, 33), splits=2),  # NaN before the start, and no key left
        MLA((33, 50), 16, queries=3, heads=6, mask="bool"),  # one query sees nothing
        MLA((20, 90), 64, heads=16, rank=512, rope=64),  # DeepSeek-V2-Lite
    ],
    "gqa": [
        GQA((0, 1, 17, 40), 16, splits=2),
        GQA((31, 17), 16, heads=6, kv_heads=3, head_dim=24, value_dim=40),  # heads that begin at odd bytes
        GQA((70, 40, 33), 16, queries=2, starts=(35, 7, 33), splits=2),
        GQA((20, 37), 16, heads=4, kv_heads=4, head_dim=16, value_dim=48, mask="float"),
    ],
}


def check_attention(attention, kind, dtype):
    """Poison in unused pages is the codes and scales of NaN."""
    from deepseek_accel.kernels import gqa_attention as gqa_kernel
    from deepseek_accel.kernels import mla_attention as mla_kernel

    module, _, reference = ATTENTION[attention]
    launch = {"mla": mla_kernel, "gqa": gqa_kernel}[attention].launch
    for index, case in enumerate(CASES_OF[attention]):
        fp8, plain = coded(module.case_inputs(case, dtype, "cpu", index), kind)
        expected = reference(**plain)
        actual = launch(**fp8, num_splits=case.splits or 1, least=1)
        assert actual.dtype == dtype
        error = (actual.double() - expected).abs().max() / expected.abs().max()
        assert error < (3e-6 if dtype == torch.float32 else 4e-3), (case, error)
        if index == 0:
            address = torch.tensor([fp8["storage"].data_ptr()])
            moved = dict(fp8, storage=torch.full_like(fp8["storage"][:1], 255), address=address)
            assert torch.equal(launch(**moved, num_splits=case.splits or 1, least=1), actual)


BOTH = [("e4m3", torch.float32), ("e5m2", torch.float16)]


@pytest.mark.parametrize("kind, dtype", BOTH, ids=str)
@pytest.mark.parametrize("attention", ATTENTION)
def test_attention_kernel(attention, kind, dtype):
    interpret(check_attention, attention, kind, dtype)


def check_nan_rows(kind):
    """A key that is NaN makes every row that sees it NaN, and no other."""
    from deepseek_accel.kernels.mla_attention import launch

    case = mla_attention.LatentCase((20, 33), 16)
    inputs = mla_attention.case_inputs(case, torch.float32)
    inputs["storage"][inputs["block_table"][1, 1], 3, 5] = float("inf")
    fp8, _ = coded(inputs, kind)
    for attend in (launch, mla_attention.latent_attention):
        out = attend(**fp8)
        assert out[0].isfinite().all() and out[1].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_seen(kind):
    interpret(check_nan_rows, kind)


# Writing: the kernels' bits are the reference's, but where fp32 sums in another order round a number the other way.


def same_bytes(ours, expected, pieces, rounds: bool) -> None:
    """Compare entries [..., bytes]. pieces: (first, last, dtype) of the parts; what is between them is not written."""
    for first, last, dtype in pieces:
        actual, wanted = (rows[..., first:last].view(dtype) for rows in (ours, expected))
        if dtype.is_floating_point:
            assert torch.equal(actual.isnan(), wanted.isnan()), "left out, or something else was written"
            error = relative_error(actual.float().nan_to_num(), wanted.float().nan_to_num())
            assert error < (2e-3 if dtype == torch.float16 else 1e-5), error
        else:
            differ = actual != wanted
            assert differ.float().mean() <= (0.02 if rounds else 0), differ.float().mean()
            assert ((actual.int() - wanted.int()).abs()[differ] <= 1).all()


def byte_storage(like, width):
    return torch.full((*like.shape[:-1], width), 255, dtype=torch.uint8)


def latent_pieces(case, dtype):
    layout = latent_layout(case.rank, case.rope, dtype.itemsize)
    rope = case.rope * dtype.itemsize
    return layout.width, [
        (0, case.rank, torch.uint8),
        (layout.second, layout.second + rope, dtype),
        (layout.scales, layout.scales + 4, torch.float32),
    ]


def check_latent_write(kind, dtype):
    from test_latent_write import inputs

    from deepseek_accel.kernels.latent_write import launch

    for case in latent_write.CASES[1:4]:
        arguments = inputs(case, dtype)
        width, pieces = latent_pieces(case, dtype)
        ours, expected = (byte_storage(arguments[8], width) for _ in range(2))
        slots = arguments[9]
        slots[-1] = -1
        q_latent, q_rope = launch(*arguments[:8], ours, slots, fp8=kind)
        plain_latent, plain_rope = launch(*arguments)
        assert torch.equal(q_rope, plain_rope) and (q_latent is None or torch.equal(q_latent, plain_latent))
        latent_write.latent_write_reference(*arguments[:8], expected, slots, kind)
        same_bytes(ours, expected, pieces, rounds=True)
        moved = byte_storage(arguments[8], width)
        launch(*arguments[:8], byte_storage(arguments[8], width), slots, torch.tensor([moved.data_ptr()]), fp8=kind)
        assert torch.equal(moved, ours)


def check_prefill_write(kind, dtype):
    from deepseek_accel.kernels.prefill_write import launch

    for case in prefill_write.CASES:
        ours, expected = (prefill_write.case_inputs(case, dtype) for _ in range(2))
        width, pieces = latent_pieces(case, dtype)
        held = [byte_storage(arguments[7], width) for arguments in (ours, expected)]
        launch(*ours[:7], held[0], ours[8], kind)
        prefill_write.prefill_write_reference(*expected[:7], held[1], expected[8], kind)
        same_bytes(*held, pieces, rounds=True)
        if ours[1].numel():  # what the attention of the piece itself reads is not rounded to FP8
            assert relative_error(ours[1], expected[1]) < (1e-6 if dtype == torch.float32 else 1e-3)
            rank = case.rank
            _, wanted = ours[1][..., :rank].flatten(0, 1), ours[8] >= 0
            codes, _ = quantize(ours[1][..., :rank].flatten(0, 1)[wanted], kind)
            assert torch.equal(held[0].flatten(0, 1)[ours[8][wanted], :rank], codes), "not what was computed, encoded"


def check_entry_write(kind, dtype):
    from deepseek_accel.kernels.entry_write import launch

    for case in entry_write.CASES:
        arguments = entry_write.case_inputs(case, dtype)
        layout = grouped_layout(case.kv_heads, case.head_dim, case.value_dim)
        pieces = [
            (0, case.kv_heads * case.head_dim, torch.uint8),
            (layout.second, layout.second + case.kv_heads * case.value_dim, torch.uint8),
            (layout.scales, layout.scales + 8 * case.kv_heads, torch.float32),
        ]
        ours, expected, moved = (byte_storage(arguments[5], layout.width) for _ in range(3))
        rotated = launch(*arguments[:5], ours, arguments[6], fp8=kind)
        assert relative_error(rotated, launch(*arguments)) == 0
        entry_write.entry_write_reference(*arguments[:5], expected, arguments[6], kind)
        same_bytes(ours, expected, pieces, rounds=True)
        launch(*arguments[:5], torch.zeros_like(ours), arguments[6], torch.tensor([moved.data_ptr()]), kind)
        assert torch.equal(moved, ours)


@pytest.mark.parametrize("kind, dtype", BOTH, ids=str)
@pytest.mark.parametrize("check", [check_latent_write, check_prefill_write, check_entry_write])
def test_write_kernel(check, kind, dtype):
    interpret(check, kind, dtype)


def check_numbers(kind):
    """The kernels' scale, codes and decoded numbers are the reference's bits, NaN, zero and tiny vectors included."""
    import triton

    from deepseek_accel.kernels.fp8 import VARIANTS, round_trip_kernel

    for dtype in (torch.float32, torch.float16):
        values = torch.cat((vectors(dtype), vectors(dtype) * 1e-5, torch.full((1, 96), torch.nan).to(dtype)))
        values[3, 5] = torch.inf
        codes = torch.empty(values.shape, dtype=torch.uint8)
        scales, back = torch.empty(len(values)), torch.empty_like(values)
        block = triton.next_power_of_2(values.shape[1])
        round_trip_kernel[(len(values),)](values, codes, scales, back, values.shape[1], block, VARIANTS[kind])
        wanted, wanted_scales = quantize(values, kind)
        assert torch.equal(scales.nan_to_num(-1.0), wanted_scales[:, 0].nan_to_num(-1.0))
        assert scales[3].isnan() and scales[-1].isnan() and scales[7] == 0
        good = scales.isfinite()
        assert torch.equal(codes[good], wanted[good])
        assert torch.equal(back[good], wanted[good].view(CODES[kind]).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_in_kernels(kind):
    interpret(check_numbers, kind)
