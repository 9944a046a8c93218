"""What differs between the supported releases of transformers. Nothing else in the package asks for its version."""

from __future__ import annotations

from .errors import AccelError

OLDEST, BELOW = (5, 15), (6, 0)


def _release() -> tuple[int, int]:
    import transformers

    major, minor = transformers.__version__.split(".")[:2]
    return int(major), int(minor)


def check_transformers() -> None:
    """Raise AccelError unless the installed transformers is one this version is tested with."""
    import transformers

    if not OLDEST <= _release() < BELOW:
        raise AccelError(
            f"transformers {transformers.__version__} is installed; this version of deepseek_accel works with "
            f"transformers >={OLDEST[0]}.{OLDEST[1]},<{BELOW[0]}. Before 5.15 the cache does not hold latents. "
            f"Install a supported one: pip install 'transformers>={OLDEST[0]}.{OLDEST[1]},<{BELOW[0]}'"
        )


def cache_argument() -> str:
    """What model forwards and outputs call the cache: `cache` from 5.24 on, `past_key_values` before."""
    return "cache" if _release() >= (5, 24) else "past_key_values"


def crop_takes_length() -> bool:
    """Whether a positive argument of `Cache.crop` is still read as the length to keep; removed in 5.18."""
    return _release() < (5, 18)


def v32_caches_latents() -> bool:
    """Whether DeepSeek-V3.2 caches latents, as V2 and V3 do, and combines boolean masks with its indexer's choice."""
    return _release() >= (5, 24)
