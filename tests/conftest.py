"""Marks the tests of kernels alone, which know nothing of transformers: CI runs them on one version of it. Slow tests
come first, so that no process ends alone with them."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        names = getattr(getattr(item, "function", None), "__code__", None)
        if names is not None and "interpret" in names.co_names:
            item.add_marker(pytest.mark.kernels)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
