"""Class q-pack: the words of AutoAWQ's layout."""

import torch

from deepseek_accel.ops.int4 import dequantize, pack, round_to_nearest
from deepseek_accel.quantization.layout import from_awq, from_words, to_awq, to_words


def plain_values(tensors, module):
    """The values [N, K] of a stored weight by the definition of the layout, word by word."""
    words, zero_words, scales = (tensors[f"{module}.{name}"] for name in ("qweight", "qzeros", "scales"))
    out = torch.empty(words.shape[1] * 8, words.shape[0], dtype=torch.double)
    group = words.shape[0] // scales.shape[0]
    for n in range(out.shape[0]):
        shift = 4 * (0, 2, 4, 6, 1, 3, 5, 7).index(n % 8)
        for k in range(out.shape[1]):
            code = int(words[k, n // 8]) >> shift & 15
            zero = int(zero_words[k // group, n // 8]) >> shift & 15
            out[n, k] = (code - zero) * float(scales[k // group, n])
    return out


def test_words_have_the_order_of_awq():  # Q01
    rows = torch.arange(16, dtype=torch.uint8).view(2, 8)
    assert to_words(rows)[:, 0].tolist() == [0x75316420, 0xFDB9ECA8 - 2**32]
    assert torch.equal(from_words(to_words(rows)), rows)


def test_values_are_those_of_the_definition():  # Q01: a matrix that is not square, random zeros and scales
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    codes, scales, zeros = round_to_nearest(weight.half(), 32)
    tensors = {f"m.{k}": v for k, v in to_awq(codes, scales, zeros).items()}
    assert [list(tensors[f"m.{k}"].shape) for k in ("qweight", "qzeros", "scales")] == [[64, 3], [2, 3], [2, 24]]
    expected = plain_values(tensors, "m")
    packed = pack(*from_awq(*tensors.values()), 32)
    assert torch.equal(dequantize(packed, torch.float64), expected)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    assert torch.allclose(x @ dequantize(packed, torch.float64).T, x @ expected.T, rtol=1e-12)
