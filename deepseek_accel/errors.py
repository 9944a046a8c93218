"""What can go wrong. Every error is raised before the model or the cache is changed, or after it has been put back."""


class AccelError(Exception):
    """Base class; catch this to catch everything the library raises on purpose."""


class UnsupportedModelError(AccelError):
    """The model is of no family this library knows."""


class PlanError(AccelError, ValueError):
    """The configuration is wrong, or its passes cannot be applied to this model. Nothing was changed."""


class RestoreError(AccelError):
    """The model was changed by someone else after `optimize`. Nothing was restored."""


class CacheFullError(AccelError):
    """The page pool may not grow far enough for the tokens of this call. The cache is as it was before the call."""


class CheckpointError(AccelError):
    """A checkpoint directory is missing files, or holds something this library does not read."""
