"""The import of Ray, which has to be installed in the version that this package is tested with."""

from __future__ import annotations

import importlib
from typing import Any

from ramify.errors import InvalidRequest

VERSION = "2.60"
"""Minor version of Ray that is required, as the interfaces of Serve's request routers and of Data's actors
differ between minor versions."""
REMEDY = "pip install 'ramify-llm[ray]'"


def require(module: str = "ray") -> Any:
    """Import a module of Ray, such as ``ray.data`` or ``ray.serve``.

    Raises `InvalidRequest` if Ray, or a package that this part of Ray needs, is not installed, and if Ray's
    version is not `VERSION`.
    """
    try:
        import ray

        version: str = ray.__version__
        if version.startswith(f"{VERSION}."):
            return importlib.import_module(module)
    except ImportError as error:
        raise InvalidRequest(f"{module} cannot be imported: {error}.", field="ray", remedy=REMEDY) from error
    raise InvalidRequest(f"Ray is {version}; it must be {VERSION}.", field="ray", remedy=REMEDY)
