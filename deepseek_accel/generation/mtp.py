"""The multi-token-prediction layer of a DeepSeek-V3 checkpoint (arXiv 2412.19437, section 2.2) as a draft.

It is stored as layer `num_hidden_layers`: from the target's normalised state at token t and the embedding of token
t + 1 it predicts token t + 2. Fed its own output in place of the target's state it predicts further. transformers
leaves it out when it loads a model, so it is read from the checkpoint, once. Embedding, head and rotary embedding are
the target's own; the copies that the checkpoint has of them are not read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..errors import PlanError
from ..ops.rms_norm import rms_norm
from .drafts import Pick, catch_up, chain, right_aligned
from .graphs import StepGraphs
from .lines import LatentAttention, Layer, Mixture, Model, Norm
from .prefill import entry_sizes
from .ragged import RaggedRows
from .ragged_graphs import RaggedGraphs
from .step import Stepper

CONTEXT = 128
"""Tokens of a prompt that the layer reads, its last ones. Of bundled files' 600, so many do as well as all."""
UNREAD = 64
"""Runs of the target whose states are kept as they come, until the layer is asked."""


class MTP(NamedTuple):
    """What the checkpoint adds to the target."""

    token_norm: Norm
    state_norm: Norm
    mix: torch.Tensor
    """[D, 2 D]: of the token's embedding, then the state."""
    layer: Layer
    norm: Norm

    def to(self, like: torch.Tensor) -> MTP:
        return _moved(self, like.device)  # type: ignore[no-any-return]


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        parts = [_moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def find_mtp(model: Any) -> tuple[dict[str, Path], str]:
    """(file of each tensor of the layer, prefix of their names). Raises PlanError with what is missing."""
    config = model.config.get_text_config(decoder=True)
    prefix = f"model.layers.{config.num_hidden_layers}."
    directory = _directory(model)
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        files = {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    elif single.is_file():
        from safetensors import safe_open

        with safe_open(single, "pt") as file:
            files = dict.fromkeys(file.keys(), single)
    else:
        raise PlanError(f'draft="mtp" reads the layer from the checkpoint, and {directory} holds no safetensors')
    found = {name: file for name, file in files.items() if name.startswith(prefix)}
    if f"{prefix}eh_proj.weight" not in found:
        raise PlanError(f"{directory} holds no multi-token-prediction layer ({prefix}eh_proj.weight)")
    if any(name.endswith(("weight_scale_inv", "qweight")) for name in found):
        raise PlanError(f"the multi-token-prediction layer in {directory} is quantized; only plain weights are read")
    return found, prefix


def _directory(model: Any) -> Path:
    name = getattr(model.config, "_name_or_path", "") or getattr(model, "name_or_path", "")
    if name and Path(name).is_dir():
        return Path(name)
    if name:
        from transformers.utils import cached_file

        try:
            if (config := cached_file(name, "config.json", local_files_only=True)) is not None:
                return Path(config).parent
        except OSError:
            pass
    raise PlanError(
        f'draft="mtp" reads the layer from the checkpoint, and {name or "this model"!r} is no directory here'
    )


def read_mtp(model: Any, family: Any) -> MTP:
    """The layer, on the device and in the dtypes of the target's last layer. Raises PlanError as `find_mtp`."""
    from safetensors import safe_open

    files, prefix = find_mtp(model)
    last = family.layers(model)[-1]
    dtype, device = last.self_attn.o_proj.weight.dtype, last.self_attn.o_proj.weight.device
    read: dict[str, torch.Tensor] = {}
    for path in sorted(set(files.values())):
        with safe_open(path, "pt") as file:
            for name in (name for name, where in files.items() if where == path):
                short = name.removeprefix(prefix).removesuffix(".weight")
                if short not in ("embed_tokens", "shared_head.head"):
                    read[short] = file.get_tensor(name)

    def get(name: str, like: torch.Tensor | None = None) -> torch.Tensor:
        if name not in read:
            raise PlanError(f"the checkpoint of {model.config._name_or_path} lacks {prefix}{name}")
        return read[name].to(device=device, dtype=dtype if like is None else like.dtype).contiguous()

    def norm(name: str) -> Norm:
        return get(name), last.input_layernorm.variance_epsilon

    attention = _read_attention(get, norm, last.self_attn, low_rank="self_attn.q_a_proj" in read)
    layer = Layer(
        norm("input_layernorm"), attention, norm("post_attention_layernorm"), _read_mixture(get, last.mlp, family)
    )
    return MTP(norm("enorm"), norm("hnorm"), get("eh_proj"), layer, norm("shared_head.norm"))


def _read_attention(
    get: Callable[..., torch.Tensor], norm: Callable[[str], Norm], like: Any, low_rank: bool
) -> LatentAttention:
    first = get("self_attn.q_a_proj" if low_rank else "self_attn.q_proj")
    w_kv = get("self_attn.kv_b_proj")
    nope, value = like.qk_nope_head_dim, like.v_head_dim
    w_uk, w_uv = w_kv.view(-1, nope + value, like.kv_lora_rank).split([nope, value], dim=1)
    return LatentAttention(
        (first, get("self_attn.kv_a_proj_with_mqa")),
        (None, None),
        norm("self_attn.q_a_layernorm") if low_rank else None,
        (get("self_attn.q_b_proj"), None) if low_rank else None,
        norm("self_attn.kv_a_layernorm"),
        w_kv,
        w_uk,
        w_uv,
        (get("self_attn.o_proj"), None),
        like.scaling,
        like.qk_head_dim,
    )


def _read_mixture(get: Callable[..., torch.Tensor], block: Any, family: Any) -> Mixture:
    """Routed and shared experts like those of the target's last layer, `block`."""
    gate = block.gate
    bias = getattr(gate, "e_score_correction_bias", None)
    experts = range(len(gate.weight))
    gate_up = torch.stack(
        [torch.cat([get(f"mlp.experts.{e}.{part}_proj") for part in ("gate", "up")]) for e in experts]
    )
    down = torch.stack([get(f"mlp.experts.{e}.down_proj") for e in experts])
    shared = tuple(get(f"mlp.shared_experts.{part}_proj") for part in ("gate", "up", "down"))
    return Mixture(
        get("mlp.gate", gate.weight),
        None if bias is None else get("mlp.gate.e_score_correction_bias", bias),
        family.router(gate),
        gate_up,
        down,
        shared if getattr(block, "shared_experts", None) is not None else None,  # type: ignore[arg-type]
        drop=None,
    )


class MTPDraft:
    """The layer at work in one call, on a cache of its own. Its entry i is of the state at i and the token at i + 1."""

    def __init__(
        self, mtp: MTP, target: Stepper, cache: Any, shifts: torch.Tensor, starts: list[int] | None,
        first: int, states: torch.Tensor, graphs: StepGraphs | None = None,
    ) -> None:  # fmt: skip
        """cache and graphs: the target's. states [B, S, D]: of the prompt's tokens from index `first`
        on, after the last layer."""
        from ..cache.paged import one_layer_cache

        self._first = first
        self._mtp, self._target = mtp, target.model
        model = Model(target.model.embedding, (mtp.layer,), mtp.norm, target.model.head, target.model.rotary)
        self._stepper = Stepper(model, target.family, target.attention)
        own = one_layer_cache(cache, target.attention)
        own.open(len(states), [entry_sizes(mtp.layer.attention)], model.dtype, model.device, 1)
        if starts is not None:
            starts = [max(0, start - self._first) for start in starts]
        self._ragged = RaggedRows(self._stepper, own, shifts - self._first, starts)
        if graphs is not None:
            self._ragged.graphs[False] = RaggedGraphs(graphs, f"mtp {mtp.mix.data_ptr()}", self._stepper, own)
        self._unread = list(self._normal(states))
        """[n, D] by row: normalised states of tokens whose entries are still to be made."""
        self._learned: list[tuple[torch.Tensor, list[int], list[int], list[int]]] = []

    def _normal(self, states: torch.Tensor) -> torch.Tensor:
        return rms_norm(states.flatten(0, 1), *self._target.norm).view(states.shape)

    def _mixed(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """tokens [B, S], states [B, S, D] -> what the layer takes, [B, S, D]."""
        mtp, shape = self._mtp, states.shape
        embedded = F.embedding(tokens.flatten(), self._target.embedding)
        parts = rms_norm(embedded, *mtp.token_norm), rms_norm(states.flatten(0, 1), *mtp.state_norm)
        return F.linear(torch.cat(parts, -1), mtp.mix).view(shape)

    def learn(self, hidden: torch.Tensor, rows: list[int], counts: list[int], stand: list[int]) -> None:
        self._learned.append((hidden.clone(), rows, counts, stand))  # it stands until the next run only
        if len(self._learned) >= UNREAD:
            self._take_in()

    def _take_in(self) -> None:
        """Sort what was learned by row."""
        new: list[list[torch.Tensor]] = [[states] for states in self._unread]
        for hidden, rows, counts, stand in self._learned:
            normal, size = self._normal(hidden), hidden.shape[1]
            for i, (r, count, n) in enumerate(zip(rows, counts, stand, strict=True)):
                new[r].append(normal[i, size - count : size - count + n])
        self._learned.clear()
        self._unread = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in new]

    def propose(self, texts: list[list[int]], counts: list[int], pick: Pick) -> list[list[int]]:
        self._take_in()
        ragged = self._ragged
        rows = [r for r, count in enumerate(counts) if count]
        for run in catch_up([len(self._unread[r]) for r in rows]):
            some = [(r, n) for r, n in zip(rows, run, strict=True) if n]
            out, logits = self._read(texts, [r for r, _ in some], [n for _, n in some])
        last = out[:, -1]
        known, ones = list(ragged.lengths), [1] * len(rows)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            nonlocal last
            out, logits = ragged.run(self._mixed(tokens[:, None], last[:, None]), ones, rows)
            last = out[:, -1]
            ragged.grow(rows, ones)
            return logits[:, -1]

        try:
            return chain(logits[:, -1], texts, counts, pick, step)
        finally:
            ragged.lengths = known

    def _read(self, texts: list[list[int]], rows: list[int], counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the entries of the next counts[i] states of row rows[i]: what `RaggedRows.run` gives."""
        size, embedding = max(counts), self._target.embedding
        states, tokens = embedding.new_zeros(len(rows), size, embedding.shape[1]), []
        for i, (r, count) in enumerate(zip(rows, counts, strict=True)):
            at = self._first + self._ragged.lengths[r] + 1
            states[i, size - count :] = self._unread[r][:count]
            self._unread[r] = self._unread[r][count:]
            tokens.append(texts[r][at : at + count])
        mixed = self._mixed(right_aligned(tokens, embedding.device), states)
        out = self._ragged.run(mixed, counts, rows)
        self._ragged.grow(rows, counts)
        return out
