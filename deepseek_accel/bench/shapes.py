"""The models that are measured: published shapes with random weights, the bundled model, and local checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AccelError
from ..loading import load_directory
from ..quantization.files import local_config


def _yarn(mscale: float) -> dict[str, Any]:
    return dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=40.0,
        original_max_position_embeddings=4096,
        beta_fast=32,
        beta_slow=1,
        mscale=mscale,
        mscale_all_dim=mscale,
    )


_LATENT: dict[str, Any] = dict(
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    first_k_dense_replace=1,
    max_position_embeddings=163840,
    rms_norm_eps=1e-6,
)

# From the config.json of the published checkpoints.
SHAPES: dict[str, dict[str, Any]] = {
    "v2-lite": _LATENT
    | dict(
        model_type="deepseek_v2",
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        rope_parameters=_yarn(0.707),
    ),
    # The first four layers of DeepSeek-V3, of which one (there three) is dense.
    "v3-4layer": _LATENT
    | dict(
        model_type="deepseek_v3",
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=128,
        num_key_value_heads=128,
        q_lora_rank=1536,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        rope_parameters=_yarn(1.0),
    ),
    "deepseek-moe-16b": dict(
        model_type="deepseek",
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        norm_topk_prob=False,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
    ),
    "llm-7b": dict(
        model_type="llama",
        vocab_size=102400,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=30,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
    ),
    "r1-distill-qwen-7b": dict(
        model_type="qwen2",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ),
}
TINY = "tiny"
NAMES = (*SHAPES, TINY)

WEIGHT_STD = 0.02
EMBEDDING_STD = 1.0


@dataclass(frozen=True)
class Point:
    """How many sequences, and how many prompt tokens each."""

    batch: int
    prompt_length: int

    @classmethod
    def parse(cls, text: str) -> Point:
        """From "8x1024"."""
        batch, _, length = text.strip().partition("x")
        if not (batch.isdecimal() and length.isdecimal() and int(batch) and int(length)):
            raise AccelError(f"a point is written BATCHxPROMPT, such as 8x1024; got {text!r}")
        return cls(int(batch), int(length))

    @classmethod
    def parse_list(cls, text: str) -> tuple[Point, ...]:
        """From "1x1024,8x1024"."""
        return tuple(cls.parse(part) for part in text.split(","))

    def __str__(self) -> str:
        return f"{self.batch}x{self.prompt_length}"


@dataclass
class Subject:
    """A model on its device, and the prompts it is measured with."""

    name: str
    model: Any
    text_ids: Any = None
    """[T] token ids of real text, or None for random ids."""

    def prompt(self, point: Point, seed: int = 0) -> Any:
        """[batch, prompt_length] token ids; every row is different."""
        import torch

        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        generator = torch.Generator().manual_seed(seed)
        shape = (point.batch, point.prompt_length)
        if self.text_ids is None or len(self.text_ids) <= point.prompt_length:
            ids = torch.randint(0, vocabulary, shape, generator=generator)
        else:
            starts = torch.randint(0, len(self.text_ids) - point.prompt_length, (point.batch,), generator=generator)
            ids = torch.stack([self.text_ids[start : start + point.prompt_length] for start in starts.tolist()])
        return ids.to(self.model.device)


def random_model(config: dict[str, Any], device: Any, dtype: Any, seed: int = 0) -> Any:
    """A model of the shape with random weights, created on the device, in eval mode. It never ends a sequence."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    options = dict(pad_token_id=0, bos_token_id=0, eos_token_id=None)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**config, **options}), dtype=dtype)
    return randomize(model, seed).eval()


def randomize(model: Any, seed: int = 0) -> Any:
    """Draw weights in place so that activations, attention scores and router logits all have a spread of about one.

    Matrices have std 0.02, norms are one, router rows 1 / sqrt(hidden): logits of std 1, which spread tokens evenly
    over all experts. Embeddings have std 1, so that rows stay different through all layers.
    """
    import torch

    generator = torch.Generator(model.device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith("gate.weight"):
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            elif "embed_tokens" in name:
                parameter.normal_(0.0, EMBEDDING_STD, generator=generator)
            else:
                parameter.normal_(0.0, WEIGHT_STD, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.zero_()
    return model


def load(name: str, device: Any, dtype: Any) -> Subject:
    """The model of a name in NAMES, or of a local checkpoint directory, on the device.

    Raises AccelError if there is neither, CheckpointError if the directory cannot be read.
    """
    if name in SHAPES:
        require_memory(name, device, dtype)
        return Subject(name, random_model(SHAPES[name], device, dtype))
    if name == TINY:
        from .. import models

        model, tokenizer = models.load_tiny(dtype=dtype, device=device)
        return Subject(name, model, heldout_ids(tokenizer))
    if not Path(name).is_dir():
        raise AccelError(f"no model {name!r}: not a directory, and not one of {', '.join(NAMES)}")
    local_config(name)
    return Subject(name, load_directory(name, dtype).to(device))


def require_memory(name: str, device: Any, dtype: Any) -> None:
    """Raise AccelError if the weights of a shape would not fit; an operating system may kill the process instead."""
    import psutil
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[name]))
    need = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if need > free:
        raise AccelError(
            f"{name} needs {need / 2**30:.0f} GiB for its weights in {str(dtype).removeprefix('torch.')}, and "
            f"{free / 2**30:.0f} GiB are free on {device}. Try --model tiny, or --dtype bfloat16."
        )


def heldout_ids(tokenizer: Any) -> Any:
    """[T] ids of the bundled held-out text."""
    import torch

    from .. import models

    parts = [tokenizer(document, verbose=False).input_ids for document in models.heldout_documents()]
    return torch.tensor([token for part in parts for token in part])


def chosen_config(passes: str) -> Any:
    """The OptimizeConfig of "all" (every lossless pass that fits) or of "attention,kv_cache"."""
    from ..config import OptimizeConfig

    if passes == "all":
        return OptimizeConfig.lossless()
    return OptimizeConfig.from_dict({name.strip(): {} for name in passes.split(",")} | {"allow_skips": True})


def variants(passes: str, *, ablate: bool) -> dict[str, Any]:
    """Name -> OptimizeConfig of everything to be measured against stock."""
    from ..config import OptimizeConfig

    everything = chosen_config(passes)
    alone: Sequence[Any] = everything.ordered() if ablate else ()
    name = "all" if ablate or passes == "all" else passes.replace(",", "+")
    return {p.name: OptimizeConfig((p,), allow_skips=True) for p in alone} | {name: everything}
