"""DeepSeek-MoE by the formulas of arXiv 2401.06066 in float64, and checkpoints in the published layout."""

import json
import math

import torch
from safetensors.torch import save_file

# The fields of the published config.json, made small; all sizes differ.
CONFIG = json.loads("""{
"architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "torch_dtype": "bfloat16", "auto_map": {
  "AutoConfig": "configuration_deepseek.DeepseekConfig", "AutoModel": "modeling_deepseek.DeepseekModel",
  "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM"},
"vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "hidden_act": "silu",
"num_attention_heads": 4, "num_key_value_heads": 4, "attention_bias": false, "attention_dropout": 0.0,
"max_position_embeddings": 512, "rope_theta": 10000, "rope_scaling": null, "rms_norm_eps": 1e-06,
"moe_intermediate_size": 24, "n_routed_experts": 12, "n_shared_experts": 2, "num_experts_per_tok": 3,
"first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": false, "scoring_func": "softmax",
"aux_loss_alpha": 0.001, "seq_aux": true, "bos_token_id": 1, "eos_token_id": 0, "initializer_range": 0.02,
"pretraining_tp": 1, "tie_word_embeddings": false, "use_cache": true}""")


def tensors(config):
    """Name -> tensor as published: no two-dimensional tensor holds more than one expert. bf16 with std 0.1."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape, mean=0.0):
        return (torch.randn(shape, generator=generator) * 0.1 + mean).bfloat16()

    d, out = config["hidden_size"], {}

    def mlp(name, width):
        out.update({f"{name}.{p}_proj.weight": draw(width, d) for p in ("gate", "up")})
        out[f"{name}.down_proj.weight"] = draw(d, width)

    out["model.embed_tokens.weight"], out["lm_head.weight"] = draw(config["vocab_size"], d), draw(96, d)
    out["model.norm.weight"] = draw(d, mean=1.0)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        out.update({f"{layer}.self_attn.{p}_proj.weight": draw(d, d) for p in "qkvo"})
        out[f"{layer}.input_layernorm.weight"] = draw(d, mean=1.0)
        out[f"{layer}.post_attention_layernorm.weight"] = draw(d, mean=1.0)
        if i < config["first_k_dense_replace"] or i % config["moe_layer_freq"]:
            mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        out[f"{layer}.mlp.gate.weight"] = draw(config["n_routed_experts"], d)
        for e in range(config["n_routed_experts"]):
            mlp(f"{layer}.mlp.experts.{e}", config["moe_intermediate_size"])
        if config["n_shared_experts"]:
            mlp(f"{layer}.mlp.shared_experts", config["moe_intermediate_size"] * config["n_shared_experts"])
    return out


def publish(directory, config=CONFIG):
    """A checkpoint directory as published, in three files with an index. Returns its tensors."""
    directory.mkdir()
    out = tensors(config)
    (directory / "config.json").write_text(json.dumps(config))
    names, where = sorted(out), {}
    for shard in range(3):
        file = f"model-{shard + 1:05d}-of-00003.safetensors"
        save_file({n: out[n] for n in names[shard::3]}, directory / file, {"format": "pt"})
        where |= dict.fromkeys(names[shard::3], file)
    size = sum(t.nbytes for t in out.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


def reference(weights, config, ids):
    """Logits [B, S, V] from the formulas, in float64 and without a class: every token and expert by itself."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    heads, d = config["num_attention_heads"], config["hidden_size"]
    size, length = d // heads, ids.shape[1]

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]

    def ffn(x, name):
        gate, up = w[f"{name}.gate_proj.weight"] @ x, w[f"{name}.up_proj.weight"] @ x
        return w[f"{name}.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)

    def rotate(x):  # [S, size]: the pair (j, j + size / 2) turns by position / theta^(2 j / size)
        half = size // 2
        steps = config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) * 2 / size)
        angle = torch.arange(length, dtype=torch.float64)[:, None] * steps
        first, second = x[:, :half], x[:, half:]
        turned = first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()
        return torch.cat(turned, -1)

    def attend(x, name):  # [S, D]
        q, k, v = (x @ w[f"{name}.{p}_proj.weight"].T for p in "qkv")
        out = []
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            scores = rotate(q[:, part]) @ rotate(k[:, part]).T / math.sqrt(size)
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            out.append(scores.softmax(-1) @ v[:, part])
        return torch.cat(out, -1) @ w[f"{name}.o_proj.weight"].T

    def moe(u, name):  # one token [D]; equations 9 to 11, without the residual
        s = (w[f"{name}.gate.weight"] @ u).softmax(-1)
        chosen = sorted(range(len(s)), key=lambda e: -s[e].item())[: config["num_experts_per_tok"]]
        total = sum(s[e] for e in chosen) if config["norm_topk_prob"] else 1.0
        routed = sum(s[e] / total * ffn(u, f"{name}.experts.{e}") for e in chosen)
        return routed + ffn(u, f"{name}.shared_experts") if config["n_shared_experts"] else routed

    logits = []
    for row in ids:
        x = w["model.embed_tokens.weight"][row]
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            x = x + attend(norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn")
            block = moe if f"{layer}.mlp.gate.weight" in w else ffn
            normed = norm(x, f"{layer}.post_attention_layernorm")
            x = x + torch.stack([block(token, f"{layer}.mlp") for token in normed])
        logits.append(norm(x, "model.norm") @ w["lm_head.weight"].T)
    return torch.stack(logits)
