"""The test classes of the tree given with `--transformers-tree`, one per family.

A tree without `tests/models` (the source distribution has none) still has the mixins those classes are made of; then
the mixins run over small configs of our own, from `small.py`.
"""

import importlib
import importlib.util

from plugin import FAMILIES

for _family in FAMILIES:
    if importlib.util.find_spec("tests.models") and importlib.util.find_spec(f"tests.models.{_family}"):
        _module = importlib.import_module(f"tests.models.{_family}.test_modeling_{_family}")
        _found = {n: c for n, c in vars(_module).items() if n.endswith("ModelTest") and c.__module__ == _module.__name__}
    else:
        from small import test_class

        _found = {(_class := test_class(_family)).__name__: _class}
    globals().update(_found)
