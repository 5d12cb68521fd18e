"""`versions`: of Python and of the libraries that may change results, for `versions.json`."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from silotune.version import __version__

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic")


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of Python and of the libraries that may change a result; read once, from files."""
    installed = {"python": platform.python_version(), "silotune": __version__}
    for name in _LIBRARIES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "not installed"
    return MappingProxyType(installed)
