"""The options of `plugin.py`, and nothing to collect unless `--transformers-tree` is given."""

from plugin import pytest_addoption, pytest_configure, tree_of

__all__ = ["pytest_addoption", "pytest_configure"]


def pytest_ignore_collect(collection_path, config):
    return True if collection_path.name == "test_transformers.py" and tree_of(config) is None else None
