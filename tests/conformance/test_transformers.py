"""The test classes of the tree given with `--transformers-tree`, one per family.

A tree without `tests/models` (the source distribution has none) still has the mixins those classes are made of; then
the mixins run over small configs of our own, from `small.py`.
"""

import importlib
import importlib.util

import small
from plugin import FAMILIES


def model_test_of(family):
    """The `ModelTest` class of one family: the tree's, or one over a config of ours."""
    name = f"tests.models.{family}"
    if not importlib.util.find_spec("tests.models") or not importlib.util.find_spec(name):
        return small.model_test(family)
    module = importlib.import_module(f"{name}.test_modeling_{family}")
    own = (c for c in vars(module).values() if getattr(c, "__module__", "") == module.__name__)
    return next(c for c in own if c.__name__.endswith("ModelTest"))


globals().update({c.__name__: c for c in map(model_test_of, FAMILIES)})
