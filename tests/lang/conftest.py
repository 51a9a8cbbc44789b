from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ramify as rm
from tests.end_to_end.served import serve
from tests.lang.engines import OPTIONS, write_long


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose tokens are bytes."""
    return write_long(tmp_path_factory.mktemp("models") / "long")


@pytest.fixture(scope="session")
def engine(model_folder: Path) -> Iterator[rm.Engine]:
    with rm.Engine(str(model_folder), **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="session")
def endpoint(model_folder: Path) -> Iterator[rm.RuntimeEndpoint]:
    """The same model behind `ramify serve`."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    with serve("--model", str(model_folder), *flags) as served:
        backend = rm.RuntimeEndpoint(served.url)
        yield backend
        backend.close()
