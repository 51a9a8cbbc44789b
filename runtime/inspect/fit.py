"""Whether a GGUF model can run on this machine, judged by its headers."""

from __future__ import annotations

from pathlib import Path

from ramify.runtime.inspect.machine import this_machine
from ramify.runtime.inspect.report import inspected
from ramify.runtime.inspect.sparse import headers_of
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.hub.names import Quant
from ramify.runtime.model.hub.repository import Listing


def why_not(weights: Path) -> str | None:
    """The reasons why the GGUF model `weights` cannot run on this machine; None if it can."""
    found = inspected(ModelFiles("", weights, weights.parent), this_machine(), chat=False)
    return "; ".join(refusal.reason for refusal in found.refused) or None


def why_not_on_hub(listing: Listing, quant: Quant) -> str | None:
    """The reasons why the model `quant` on the hub cannot run on this machine, judged by its size and the
    headers of its files; None if it can."""
    memory = this_machine().memory
    if quant.size > memory:
        return f"it is larger than the memory, {memory / 2**30:.2f} GiB"
    return why_not(headers_of(listing, quant.files) / quant.files[0])
