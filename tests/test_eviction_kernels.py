"""Scores of keys, and who goes: references by definition, kernels (in Triton's interpreter) against references."""

import pytest
import torch
from interpreter import interpret

from deepseek_accel.ops import claim as claims
from deepseek_accel.ops import gqa_attention, key_mass, mla_attention
from deepseek_accel.ops.gqa_attention import GroupedCase
from deepseek_accel.ops.key_mass import KeyScores, ScoreGroup
from deepseek_accel.ops.mla_attention import LatentCase


def by_definition(case, inputs):
    """[mass, entropy] with a softmax for each query and head, key by key."""
    query, keys, mask = inputs["query"].double(), inputs["keys"].double(), inputs["mask"]
    batch, queries, heads, _ = query.shape
    length = keys.shape[2]
    mass, entropy = torch.zeros(2, batch, length, dtype=torch.float64)
    for b in range(batch):
        for s in range(queries):
            seen = torch.ones(length, dtype=torch.bool)
            if inputs["causal"]:
                seen[length - queries + s + 1 :] = False
            if mask is not None:
                seen &= mask[b, 0, s]
            for h in range(heads if seen.any() else 0):
                scores = keys[b, h * keys.shape[1] // heads, seen] @ query[b, s, h] * inputs["scale"]
                p = scores.softmax(0)
                mass[b, seen] += p / heads
                entropy[b, seen] -= p * p.log() / heads
    return mass, entropy


@pytest.mark.parametrize("together", [1 << 28, 1])
@pytest.mark.parametrize("case", key_mass.CASES, ids=str)
def test_key_mass(case, together, monkeypatch):
    monkeypatch.setattr(key_mass, "SCORES_BYTES", together)
    inputs = key_mass.case_inputs(case, torch.float32)
    expected = by_definition(case, inputs)
    for entropy in (False, True):
        mass, score = key_mass.key_mass(**inputs, entropy=entropy)
        torch.testing.assert_close(mass.double(), expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(score.double(), expected[entropy], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", claims.VICTIM_CASES, ids=str)
def test_victim(case):
    scores, positions, first, sinks, newest = claims.victim_inputs(case)
    for row, index in enumerate(claims.victim(scores, positions, first, sinks, newest).tolist()):
        start, tokens = int(first[row]), positions[row].tolist()
        ranked = []
        for i, token in enumerate(tokens):
            score = 0.0 if scores[row, i].isnan() else scores[row, i].item()
            if token < start:
                ranked.append((-1.0, token, i))
            elif start + sinks <= token < newest:
                ranked.append((score, token, i))
        assert index == min(ranked)[2]


def test_survivors_are_what_victims_leave():
    generator = torch.Generator().manual_seed(0)
    positions = torch.stack([torch.randperm(40, generator=generator)[:20] for _ in range(3)]).int()
    scores = torch.randint(0, 3, (3, 20), generator=generator).float()
    first = torch.tensor([0, 5, 30], dtype=torch.int32)
    kept = claims.survivors(scores, positions, first, 2, 36, 12)
    assert (positions.gather(1, kept).diff(dim=1) > 0).all()
    for row in range(3):
        left = list(range(20))
        while len(left) > 12:
            own = (scores[row : row + 1, left], positions[row : row + 1, left], first[row : row + 1])
            left.pop(int(claims.victim(*own, 2, 36)))
        assert sorted(left) == sorted(kept[row].tolist())


def check_claim(case):
    from deepseek_accel.kernels.claim import launch

    ours, expected = claims.case_inputs(case), claims.case_inputs(case)
    launch(*ours)
    claims.claim_reference(*expected)
    for actual, wanted in zip(ours, expected, strict=True):
        if isinstance(actual, torch.Tensor):
            assert torch.equal(actual.nan_to_num(-5), wanted.nan_to_num(-5)), (actual, wanted)


@pytest.mark.parametrize("case", claims.CASES, ids=str)
def test_claim_kernel(case):
    interpret(check_claim, case)


LATENT = [
    LatentCase((0, 1, 37), 16, splits=2),  # rows without keys; lengths that end within a page
    LatentCase((65, 130), 64, heads=20, splits=4),  # more heads than a block, more keys than a program's
    LatentCase((40, 33), 16, starts=(7, 0), splits=1),  # left padding, one part
]
GROUPED = [
    GroupedCase((5, 37), 16, splits=2),
    GroupedCase((70, 20), 16, heads=12, kv_heads=3, head_dim=24, value_dim=24, splits=4),
    GroupedCase((33, 50), 16, mask="bool", splits=1),
]


def check_scores(latent, case, entropy, idle):
    """The attention kernel with scores against the same without, and its scores against `key_mass`."""
    module = mla_attention if latent else gqa_attention
    inputs = module.case_inputs(case, torch.float32)
    if latent:
        from deepseek_accel.kernels.mla_attention import launch
    else:
        from deepseek_accel.kernels.gqa_attention import launch
    rows, room = len(case.lengths), max(case.lengths) + 9
    live = torch.tensor([rows - idle], dtype=torch.int32)
    before = torch.rand(rows, room)
    watch = KeyScores(before.clone(), 0.5, entropy, live)
    out = launch(**inputs, num_splits=case.splits, watch=watch)
    assert torch.allclose(out, launch(**inputs, num_splits=case.splits), atol=1e-6)
    for row, length in enumerate(case.lengths):
        expected = before[row].clone()
        if row < rows - idle:
            expected[:length] = before[row, :length] * 0.5 + keys_of(latent, case, inputs, row, length, entropy)
        assert torch.allclose(watch.scores[row], expected, atol=1e-5), (row, watch.scores[row] - expected)


def keys_of(latent, case, inputs, row, length, entropy):
    start = case.starts[row] if case.starts else 0
    entries = torch.zeros(length, inputs["storage"].shape[2])
    for t in range(start, length):
        entries[t] = inputs["storage"][inputs["block_table"][row, t // case.page_size], t % case.page_size]
    if latent:
        query, keys = torch.cat((inputs["q_latent"], inputs["q_rope"]), -1), entries[None, None]
    else:
        query, size = inputs["query"], case.kv_heads * case.head_dim
        keys = entries[:, :size].unflatten(-1, (case.kv_heads, -1)).transpose(0, 1)[None]
    visible = (torch.arange(length) >= start)[None, None, None]
    if inputs["mask"] is not None:
        visible = visible & inputs["mask"][row : row + 1, ..., :length]
    return key_mass.key_mass(query[row : row + 1], keys, inputs["scale"], mask=visible, entropy=entropy)[1][0]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("case", LATENT + GROUPED, ids=str)
def test_scores_of_the_kernels(case, entropy):
    interpret(check_scores, isinstance(case, LatentCase), case, entropy, int(entropy))


def check_group(latent, case, entropy):
    """Layers that are scored together have the scores of each alone."""
    module = mla_attention if latent else gqa_attention
    if latent:
        from deepseek_accel.kernels.mla_attention import plan
    else:
        from deepseek_accel.kernels.gqa_attention import plan
    rows, room, layers = len(case.lengths), max(case.lengths) + 9, 3
    live = torch.tensor([rows], dtype=torch.int32)
    before = torch.rand(layers, rows, room)
    lengths = torch.tensor(case.lengths, dtype=torch.int32).expand(layers, -1).clone()
    lengths[1:] -= (lengths[1:] > 1).int()
    group, alone = ScoreGroup(before.clone(), lengths), before.clone()
    most = []
    for layer in range(layers):
        inputs = module.case_inputs(case, torch.float32) | {"lengths": lengths[layer], "num_splits": case.splits}
        inputs["query" if not latent else "q_latent"].mul_(layer + 1)
        together = KeyScores(group.scores[layer], 0.5, entropy, live, group)
        for watch in (together, KeyScores(alone[layer], 0.5, entropy, live)):
            _, launches = plan(**inputs, watch=watch)
            for launch in launches:
                launch.run()
            most.append(len(launches))
    assert most[:4:2] == [2, 2] and most[4] == 3 and most[1::2] == [3, 3, 3]
    assert torch.equal(group.scores, alone) and not torch.equal(alone[0], alone[2])
    assert group.raw is None and group.lse is None


@pytest.mark.parametrize("case", [LATENT[1], GROUPED[1]], ids=str)
def test_layers_scored_together(case):
    interpret(check_group, isinstance(case, LatentCase), case, True)
