"""Train the bundled tiny DeepSeek-V3 model (latent attention, experts, one MTP layer) and its Llama draft.

    python examples/build_corpus.py DATA_DIR [PACKAGE_DIR ...]
    python examples/train_tiny_deepseek.py DATA_DIR OUT_DIR --minutes 6.3 --draft-minutes 1.4

The checkpoint has the layout of a published DeepSeek-V3 checkpoint: the MTP layer is stored as layer
`num_hidden_layers` (enorm, hnorm, eh_proj, a decoder layer, shared_head). The router's e_score_correction_bias is
trained with the auxiliary-loss-free rule of the DeepSeek-V3 report (arXiv 2412.19437, section 2.1.2), so it is not
zero. The schedule follows the clock, not a step count, so the number of steps depends on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

V3: dict[str, Any] = dict(
    model_type="deepseek_v3",
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=704,
    moe_intermediate_size=128,
    num_hidden_layers=5,
    num_attention_heads=8,
    num_key_value_heads=8,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    n_routed_experts=16,
    n_shared_experts=1,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    first_k_dense_replace=1,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    attention_bias=False,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=4.0,
        original_max_position_embeddings=1024,
        beta_fast=32,
        beta_slow=1,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    tie_word_embeddings=False,
)
PUBLISHED: dict[str, Any] = dict(
    architectures=["DeepseekV3ForCausalLM"],
    dtype="bfloat16",
    num_nextn_predict_layers=1,
    hidden_act="silu",
    topk_method="noaux_tc",
    scoring_func="sigmoid",
)
"""What config.json says besides, as published checkpoints do."""
LLAMA: dict[str, Any] = dict(
    model_type="llama",
    vocab_size=2048,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    tie_word_embeddings=True,
)
PEAK_RATE, DRAFT_PEAK_RATE = 3e-3, 4e-3
MTP_LOSS_WEIGHT = 0.3
BIAS_SPEED = 2e-3  # step of the correction bias; none in the last tenth
LONG_PHASE = 0.75  # from this part of the time on, sequences are three times as long and a batch a third as large


@dataclass(frozen=True)
class Run:
    """What both trainings share."""

    data: Path
    device: str = "cuda"
    batch: int = 96
    length: int = 1024
    windows: int = 96
    """Windows of 1,024 tokens that the held-out loss is measured on."""
    seed: int = 0

    def autocast(self) -> Any:
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)


def dense_experts(experts: Any, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """All experts on all tokens, those not chosen weighted zero: the fastest form at this size, same result.

    hidden [T, D], indices [T, K], weights [T, K] -> [T, D].
    """
    gates = torch.zeros(hidden.shape[0], experts.gate_up_proj.shape[0], device=hidden.device, dtype=weights.dtype)
    gates = gates.scatter(1, indices, weights).to(hidden.dtype)  # [T, E]
    gate, up = torch.einsum("td,efd->tef", hidden, experts.gate_up_proj.to(hidden.dtype)).chunk(2, -1)
    active = F.silu(gate) * up * gates[..., None]
    return torch.einsum("tef,edf->td", active, experts.down_proj.to(hidden.dtype))


@contextlib.contextmanager
def experts_as_dense() -> Iterator[None]:
    """Run every DeepSeek-V3 expert block as `dense_experts`."""
    stock = deepseek.DeepseekV3Experts.forward
    deepseek.DeepseekV3Experts.forward = dense_experts
    try:
        yield
    finally:
        deepseek.DeepseekV3Experts.forward = stock


class MTP(nn.Module):
    """Multi-token-prediction layer: predicts token t+2 from the trunk's state at t and the embedding of t+1."""

    def __init__(self, config: Any, depth: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.enorm, self.hnorm = deepseek.DeepseekV3RMSNorm(size), deepseek.DeepseekV3RMSNorm(size)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = deepseek.DeepseekV3DecoderLayer(config, depth)
        self.norm = deepseek.DeepseekV3RMSNorm(size)

    def forward(self, hidden: torch.Tensor, embeddings: torch.Tensor, cos_sin: Any) -> torch.Tensor:
        """hidden and embeddings [B, S, D] -> [B, S, D], normalised, for the trunk's own head."""
        mixed = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], -1))
        out = self.block(mixed, attention_mask=None, position_embeddings=cos_sin)
        return self.norm(out[0] if isinstance(out, tuple) else out)


def batches(path: Path, batch: int, length: int, seed: int, device: str) -> Iterator[torch.Tensor]:
    """Endless random windows [batch, length + 2] of the token file."""
    data = torch.from_numpy(np.load(path).astype(np.int32))
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(data) - length - 2, (batch,), generator=generator)
        windows = torch.stack([data[start : start + length + 2] for start in starts])
        yield windows.to(device, non_blocking=True).long()


def rate_at(fraction: float, peak: float) -> float:
    """Learning rate: linear to `peak` over the first 3 % of the time, then a cosine down to 5 % of it."""
    warm_up = min(1.0, fraction / 0.03)
    return peak * warm_up * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, fraction))))


def make_optimizer(parameters: Iterable[nn.Parameter], peak: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        dict(params=[p for p in trained if p.ndim > 1], weight_decay=0.1),
        dict(params=[p for p in trained if p.ndim <= 1], weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model: Any, run: Run, length: int = 1024) -> float:
    """Loss on the held-out tokens in nats a token, in windows of `length` that share no context."""
    data = torch.from_numpy(np.load(run.data / "held.npy").astype(np.int64)).to(run.device)
    model.eval()
    loss, count = 0.0, 0
    for start in range(0, min(len(data) - length - 1, run.windows * length), length):
        window = data[start : start + length + 1][None]
        with run.autocast():
            logits = model(window[:, :-1], use_cache=False).logits
        loss += cross_entropy(logits, window[:, 1:], reduction="sum").item()
        count += length
    model.train()
    return loss / count


def make_target(run: Run) -> tuple[Any, MTP, Any]:
    """The untrained (model, MTP layer, config)."""
    torch.manual_seed(run.seed)
    config = AutoConfig.for_model(**V3)
    with torch.device(run.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        mtp = MTP(config, config.num_hidden_layers)
    for module in mtp.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    block = mtp.block.mlp
    for parameter in (block.experts.gate_up_proj, block.experts.down_proj, block.gate.weight):
        nn.init.normal_(parameter, std=0.02)
    nn.init.zeros_(block.gate.e_score_correction_bias)
    return model, mtp, config


class Balance:
    """The auxiliary-loss-free balancing rule: an expert chosen more often than the mean gets a lower bias."""

    def __init__(self, *models: nn.Module) -> None:
        self.routers = [m for model in models for m in model.modules() if isinstance(m, deepseek.DeepseekV3TopkRouter)]
        self.load: dict[Any, torch.Tensor] = {}
        """Tokens per expert of each router in its latest call."""
        for router in self.routers:
            router.weight.requires_grad_(True)
            router.register_forward_hook(self._count)

    def _count(self, router: Any, _: Any, output: Any) -> None:
        self.load[router] = torch.bincount(output[2].flatten(), minlength=V3["n_routed_experts"])

    @torch.no_grad()
    def step(self, speed: float) -> None:
        for router, count in self.load.items():
            router.e_score_correction_bias += speed * torch.sign(count.float().mean() - count.float())

    def show(self) -> None:
        ratios = [(count.max() / count.float().mean()).item() for count in self.load.values()]
        imbalance = {f"router{i}": round(ratio, 2) for i, ratio in enumerate(ratios)}
        print("max/mean load", imbalance, "bias range", self.routers[0].e_score_correction_bias.aminmax())


def target_losses(model: Any, mtp: MTP, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of the next token and of the one after it. tokens [B, S + 2]."""
    inputs, following, second = tokens[:, :-2], tokens[:, 1:-1], tokens[:, 2:]
    embeddings = model.model.embed_tokens(inputs)
    hidden = model.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
    loss = cross_entropy(model.lm_head(hidden), following)
    positions = torch.arange(inputs.shape[1], device=tokens.device)[None]
    ahead = mtp(hidden, model.model.embed_tokens(following), model.model.rotary_emb(hidden, positions))
    return loss, cross_entropy(model.lm_head(ahead), second)


def train_target(run: Run, minutes: float) -> tuple[Any, MTP, Any]:
    """Train model and MTP layer together for `minutes`. Returns (model, MTP layer, config)."""
    model, mtp, config = make_target(run)
    balance = Balance(model, mtp)
    parameters = [*model.parameters(), *mtp.parameters()]
    optimizer = make_optimizer(parameters, PEAK_RATE)
    path = run.data / "train.npy"
    short = batches(path, run.batch, run.length, run.seed + 1, run.device)
    long = batches(path, max(1, run.batch // 3), 3 * run.length, run.seed + 2, run.device)
    start, step = time.time(), 0
    with experts_as_dense():
        while (fraction := (time.time() - start) / (60 * minutes)) < 1:
            tokens = next(short if fraction < LONG_PHASE else long)
            set_rate(optimizer, rate_at(fraction, PEAK_RATE))
            with run.autocast():
                loss, mtp_loss = target_losses(model, mtp, tokens)
            (loss + MTP_LOSS_WEIGHT * mtp_loss).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            balance.step(BIAS_SPEED if fraction < 0.9 else 0.0)
            step += 1
            if step % 200 == 0:
                elapsed = round((time.time() - start) / 60, 2)
                losses = dict(loss=round(loss.item(), 4), mtp=round(mtp_loss.item(), 4))
                print(dict(step=step, minutes=elapsed, **losses), flush=True)
        print("held-out nats/token", evaluate(model, run), "steps", step)
    balance.show()
    return model, mtp, config


def published_layer(prefix: str, layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of a decoder layer as published checkpoints name them: one tensor per expert and projection."""
    for name, tensor in layer.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2, 0)
                yield f"{prefix}.mlp.experts.{expert}.gate_proj.weight", gate
                yield f"{prefix}.mlp.experts.{expert}.up_proj.weight", up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", down
        else:
            yield f"{prefix}.{name}", tensor


def published_tensors(model: Any, mtp: MTP, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the whole checkpoint; the MTP layer is layer `depth`."""
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    yield "model.embed_tokens.weight", embedding
    yield "model.norm.weight", model.model.norm.weight
    yield "lm_head.weight", head
    for index, layer in enumerate(model.model.layers):
        yield from published_layer(f"model.layers.{index}", layer)
    prefix = f"model.layers.{depth}"
    yield from published_layer(prefix, mtp.block)
    for name in ("enorm", "hnorm", "eh_proj"):
        yield f"{prefix}.{name}.weight", getattr(mtp, name).weight
    yield f"{prefix}.shared_head.norm.weight", mtp.norm.weight
    yield f"{prefix}.embed_tokens.weight", embedding
    yield f"{prefix}.shared_head.head.weight", head


def save_target(model: Any, mtp: MTP, config: Any, out: Path, tokenizer: Path) -> None:
    """Write the checkpoint: bf16, correction biases fp32, names as in the published DeepSeek-V3 files."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in published_tensors(model, mtp, config.num_hidden_layers):
        dtype = torch.float32 if "e_score_correction_bias" in name else torch.bfloat16
        tensors[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(V3 | PUBLISHED, indent=1))
    copy_files(tokenizer, out)


def copy_files(source: Path, out: Path) -> None:
    for file in source.iterdir():
        shutil.copyfile(file, out / file.name)


def train_draft(run: Run, minutes: float) -> Any:
    """Train the Llama draft for `minutes`."""
    torch.manual_seed(run.seed)
    with torch.device(run.device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA), dtype=torch.float32)
    optimizer = make_optimizer(model.parameters(), DRAFT_PEAK_RATE)
    windows = batches(run.data / "train.npy", run.batch, run.length, run.seed + 7, run.device)
    start, step = time.time(), 0
    while (fraction := (time.time() - start) / (60 * minutes)) < 1:
        tokens = next(windows)
        set_rate(optimizer, rate_at(fraction, DRAFT_PEAK_RATE))
        with run.autocast():
            loss = cross_entropy(model(tokens[:, :-2], use_cache=False).logits, tokens[:, 1:-1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
    print("draft held-out nats/token", evaluate(model, run), "steps", step)
    return model


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="folder that build_corpus.py wrote")
    parser.add_argument("out", type=Path, help="folder for deepseek-tiny/ and deepseek-tiny-draft/")
    parser.add_argument("--minutes", type=float, default=6, help="time for the model (default: %(default)s)")
    parser.add_argument("--draft-minutes", type=float, default=1.2, help="time for the draft (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="where to train (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=96, help="sequences a step; a third when long (default: 96)")
    parser.add_argument("--length", type=int, default=1024, help="tokens a sequence; thrice when long (default: 1024)")
    parser.add_argument("--windows", type=int, default=96, help="held-out windows of 1,024 tokens (default: 96)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.backends.cuda.matmul.allow_tf32 = True
    run = Run(arguments.data, arguments.device, arguments.batch, arguments.length, arguments.windows)
    model, mtp, config = train_target(run, arguments.minutes)
    tokenizer = arguments.data / "tokenizer"
    save_target(model, mtp, config, arguments.out / "deepseek-tiny", tokenizer)
    draft = train_draft(run, arguments.draft_minutes).to(torch.bfloat16)
    draft.save_pretrained(arguments.out / "deepseek-tiny-draft")
    copy_files(tokenizer, arguments.out / "deepseek-tiny-draft")


if __name__ == "__main__":
    main()
