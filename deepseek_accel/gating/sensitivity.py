"""What calibration learns about a model's routers, as a file and as thresholds.

Letters: L mixture layers, K chosen experts, E experts, D hidden, N sampled tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import PlanError

SAMPLED_TOKENS = 4096
_TENSORS = ("first", "second", "slope", "offset", "feeling", "logs", "fixed")
_FORMAT = "deepseek_accel gate sensitivity 1"
_SAMPLES = 64


class GateSensitivity:
    """The result of `calibrate_gates`.

    The loss of leaving out a chosen expert e of a token x with routing weight w is predicted as

        1/2 w^2 exp(slope . x + ln E[g^2 | e])  nats,   offset[e] = ln E[g^2 | e] - ln 2

    first [L, K], second [L, K]: E[-w g] and 1/2 E[(w g)^2], what leaving out the expert of each rank (by weight, the
    largest first) costs to first and second order, in nats a token; g is the gradient of the loss by w.
    slope [L, D], offset [L, E]: of the prediction.
    feeling [L, N], logs [L, N, K], fixed [L, N, K]: slope . x, ln w and 2 ln w + offset[e] of some of the calibration's
    tokens, from which thresholds are solved. All fp32, on the CPU.
    fingerprint: of the model it was made from. tokens: how many.
    """

    def __init__(self, fingerprint: str, tokens: int, **tensors: torch.Tensor) -> None:
        """Raises PlanError if the tensors are not those named above, or do not fit together."""
        if missing := [name for name in _TENSORS if name not in tensors]:
            raise PlanError(f"a gate sensitivity needs the tensors {', '.join(missing)}")
        self.fingerprint, self.tokens = fingerprint, tokens
        self.first, self.second = tensors["first"], tensors["second"]
        self.slope, self.offset = tensors["slope"], tensors["offset"]
        self.feeling, self.logs, self.fixed = tensors["feeling"], tensors["logs"], tensors["fixed"]
        layers, top_k = self.first.shape if self.first.dim() == 2 else (0, 0)
        sampled = self.feeling.shape[-1]
        expected: dict[str, tuple[int, ...]] = {"second": (layers, top_k), "feeling": (layers, sampled)}
        expected |= dict.fromkeys(("logs", "fixed"), (layers, sampled, top_k))
        expected |= {"slope": (layers, self.slope.shape[-1]), "offset": (layers, self.offset.shape[-1])}
        for name, shape in expected.items():
            if (found := tuple(tensors[name].shape)) != shape or not layers or not sampled:
                raise PlanError(f"{name} of a gate sensitivity has shape {found}, expected {shape}")

    @property
    def num_layers(self) -> int:
        return int(self.first.shape[0])

    @property
    def top_k(self) -> int:
        return int(self.first.shape[1])

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in _TENSORS}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GateSensitivity):
            return NotImplemented
        mine, theirs = self._tensors(), other._tensors()
        return (self.fingerprint, self.tokens) == (other.fingerprint, other.tokens) and all(
            torch.equal(mine[name], theirs[name]) for name in _TENSORS
        )

    def __hash__(self) -> int:
        return hash((self.fingerprint, self.tokens))

    def __repr__(self) -> str:
        return f"GateSensitivity({self.num_layers} layers, top {self.top_k}, of {self.tokens:,} tokens)"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file. Raises PlanError if that cannot be."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        facts = {"format": _FORMAT, "fingerprint": self.fingerprint, "tokens": json.dumps(self.tokens)}
        tensors = {name: tensor.contiguous() for name, tensor in self._tensors().items()}
        try:
            save_file(tensors, path, metadata=facts)
        except (SafetensorError, OSError) as error:
            raise PlanError(f"cannot write {os.fspath(path)!r}: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> GateSensitivity:
        """Read what `save` wrote. Raises PlanError if there is no such file, or it holds something else."""
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise PlanError(f"no such file: {os.fspath(path)!r}. `deepseek-accel calibrate` writes one.")
        try:
            with safe_open(path, framework="pt") as file:
                facts: dict[str, str] = file.metadata() or {}
                if facts.get("format") != _FORMAT:
                    raise PlanError(f"{os.fspath(path)!r} holds no gate sensitivity of this version")
                tensors = {name: file.get_tensor(name) for name in _TENSORS}
        except SafetensorError as error:  # a tensor is missing, too
            raise PlanError(f"{os.fspath(path)!r} cannot be read: {error}") from error
        return cls(facts["fingerprint"], json.loads(facts["tokens"]), **tensors)

    def rule(self, layer: int, method: str, temper: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(slope [D], offset [E]) of a layer's scores, before the threshold.

        temper: what power of a token's own factor exp(slope . x) counts. The mean over tokens stays the same.
        """
        if method != "gradient":
            return torch.zeros_like(self.slope[layer]), torch.zeros_like(self.offset[layer])
        return self.slope[layer] * temper, self.offset[layer] + self._shift(temper)[layer]

    def _shift(self, temper: float) -> torch.Tensor:
        """[L]: what makes up for a token's factor that counts less."""
        return self.feeling.logsumexp(1) - (temper * self.feeling).logsumexp(1)

    def scores(self, method: str, temper: float) -> torch.Tensor:
        """[L, N, K]: scores of the sampled tokens, the largest of a token first."""
        if method == "gradient":
            token = temper * self.feeling + self._shift(temper)[:, None]
            found = self.fixed + token[..., None]
        else:
            found = 2 * (self.logs - self.logs.amax(-1, keepdim=True))
        return found.sort(dim=-1, descending=True).values

    def threshold(self, target: float, method: str, min_experts: int, temper: float) -> float:
        """The score below which a pair is dropped, so that of the sampled tokens `target` * K pairs are kept.

        The best `min_experts` of a token are always kept. Raises PlanError if those alone are more.
        """
        top_k = self.top_k
        if target >= 1:
            return float("-inf")
        dropped = (1 - target) * top_k / (top_k - min_experts) if min_experts < top_k else float("inf")
        if dropped > 1 + 1e-9:
            raise PlanError(f"target {target} is {target * top_k:.3g} of {top_k} experts; min_experts is {min_experts}")
        ordered = self.scores(method, temper)[..., min_experts:].flatten().sort().values
        count = round(dropped * len(ordered))
        if not 0 < count < len(ordered):
            return float("inf") if count else float("-inf")
        return float((ordered[count - 1] + ordered[count]) / 2)  # between two: rounding moves neither across

    def kept(self, threshold: float, method: str, min_experts: int, temper: float) -> torch.Tensor:
        """[L]: mean experts a token keeps in each layer at a threshold, of the sampled tokens."""
        return min_experts + (self.scores(method, temper)[..., min_experts:] >= threshold).float().sum(-1).mean(-1)


def temper_of(target: float) -> float:
    """How much of a token's own factor counts at a target: all of it where little is dropped.

    The prediction holds for small changes. Where many experts go, tokens that it calls insensitive lose nearly all of
    theirs in every layer, and are so no more.
    """
    return min(1.0, max(0.25, 2.4 * target - 0.8))


def routers(model: Any, family: Any) -> list[Any]:
    """The gates of every mixture layer, in order."""
    return [block.gate for _, block in family.moe(model)]


def is_placeholder(module: Any) -> bool:
    """Whether a module has no weight to look at: it is on "meta", or one number seen from every index.

    What accelerate has offloaded is on "meta" too, but can be looked at.
    """
    weight = module.weight
    if weight.is_meta:
        return not _is_offloaded(module)
    return weight.numel() > 1 and not any(weight.stride())


def _is_offloaded(module: Any) -> bool:
    return bool(getattr(vars(module).get("_hf_hook"), "offload", False))


@contextmanager
def _brought(module: Any) -> Iterator[None]:
    """A module with its weights; those that accelerate has offloaded come for this moment."""
    hook = vars(module)["_hf_hook"] if _is_offloaded(module) else None
    if hook is not None:
        hook.pre_forward(module)
    try:
        yield
    finally:
        if hook is not None:
            hook.post_forward(module, None)


def fingerprint(model: Any, family: Any) -> str:
    """Names a model by what its routers and its embedding hold, whatever dtype and device it was loaded with.

    Samples are brought to what fp16 holds, and rounded to bf16: a checkpoint stored in bf16 gives the same in fp32,
    fp16 and bf16. Routed experts are not looked at, so that a quantised model is still the same.
    """
    seen = hashlib.sha256(family.model_type.encode())
    gates = routers(model, family)
    for gate in gates:
        seen.update(repr(family.router(gate)).encode())
    for module in (model.get_input_embeddings(), *gates):
        with _brought(module):
            flat = module.weight.detach().reshape(-1)
            samples = flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].to("cpu", torch.float32)
        # fp16 has no larger numbers, and fewer digits for the smallest
        samples = samples.clamp(-65504, 65504).masked_fill(samples.abs() < 2**-14, 0.0).bfloat16().contiguous()
        seen.update(repr(tuple(module.weight.shape)).encode())
        seen.update(samples.view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()[:32]
