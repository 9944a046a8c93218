"""Tell transformers about our class, as late as possible.

The config and the tokenizer go into transformers' lists when the modules that hold these are imported, or at once if
they are already. The models follow with the first config: whoever loads or builds a model has one.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODEL_TYPE = "deepseek"


def register() -> None:
    """Make the config and the tokenizer known, now or when transformers is ready. Calling it twice changes nothing."""
    once_imported("transformers.models.auto.configuration_auto", _register_config)
    once_imported("transformers.models.auto.tokenization_auto", _register_tokenizer)


def register_models() -> None:
    """Make the model classes known to AutoModel and AutoModelForCausalLM."""
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    from .configuration_deepseek import DeepseekConfig
    from .modeling_deepseek import DeepseekForCausalLM, DeepseekModel

    if DeepseekConfig in AutoModelForCausalLM._model_mapping:
        return
    # the same names in the file and the same 3-D parameters in memory as DeepSeek-V2: one tensor per expert, stacked
    layout = get_checkpoint_conversion_mapping("deepseek_v2")
    register_checkpoint_conversion_mapping(MODEL_TYPE, layout, overwrite=True)
    AutoModel.register(DeepseekConfig, DeepseekModel)
    AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM)


def _register_config(auto: Any) -> None:
    from .configuration_deepseek import DeepseekConfig

    if MODEL_TYPE not in auto.CONFIG_MAPPING:  # whoever came first keeps the name
        auto.AutoConfig.register(MODEL_TYPE, DeepseekConfig)


def _register_tokenizer(auto: Any) -> None:
    # The published tokenizer_config.json says LlamaTokenizerFast. Early releases of transformers 5 then split text as
    # Llama does, whatever tokenizer.json says; later ones know byte-level files. This entry means: as the file says.
    auto.TOKENIZER_MAPPING_NAMES.setdefault(MODEL_TYPE, "TokenizersBackend")


def once_imported(name: str, then: Callable[[Any], None]) -> None:
    """Call `then` with a module as soon as it is imported."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        then(module)
    elif not any(isinstance(finder, _Watch) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch(name, then))


class _Watch:
    """An import finder that finds nothing itself: it lets the others find one module, and is told when it has run."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = partial(_execute, loader.exec_module, self.then)
        return spec


def _execute(execute: Callable[[ModuleType], None], then: Callable[[Any], None], module: ModuleType) -> None:
    try:
        execute(module)
    except BaseException:
        once_imported(module.__name__, then)  # an interrupted import may be tried again
        raise
    then(module)
