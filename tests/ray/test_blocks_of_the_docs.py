"""The Python blocks of the guides that need Ray run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_docs import blocks, guides_that_need, name, run


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize("guide", guides_that_need("ray"), ids=name)
def test_blocks_that_need_ray(guide: Path, tmp_path: Path) -> None:
    for block in blocks(guide):
        if block.needs == "ray":
            run(block.code.replace("/tmp/", f"{tmp_path}/"), tmp_path)
