"""Whether a GGUF model can run on this machine, by its headers."""

from __future__ import annotations

from pathlib import Path

from ramify.runtime.inspect.machine import this_machine
from ramify.runtime.inspect.report import inspected
from ramify.runtime.inspect.sparse import headers_of
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.hub.names import Quant
from ramify.runtime.model.hub.repository import Listing


def why_not(weights: Path) -> str | None:
    """The reasons against running the GGUF model `weights` on this machine; None if it runs."""
    found = inspected(ModelFiles("", weights, weights.parent), this_machine(), chat=False)
    return "; ".join(refusal.reason for refusal in found.refused) or None


def why_not_on_hub(listing: Listing, quant: Quant) -> str | None:
    """The reason by which `why_not` refuses a model on the hub, from its size or the headers of its files."""
    memory = this_machine().memory
    if quant.size > memory:
        return f"it is larger than the memory, {memory / 2**30:.2f} GiB"
    return why_not(headers_of(listing, quant.files) / quant.files[0])
