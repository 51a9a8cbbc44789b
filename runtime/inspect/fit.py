"""Which models can run on this machine, and a model's files for looking at them."""

from __future__ import annotations

from pathlib import Path

from ramify.runtime.inspect.machine import this_machine
from ramify.runtime.inspect.report import inspected
from ramify.runtime.inspect.sparse import headers_of
from ramify.runtime.model.hub import resolve as names
from ramify.runtime.model.hub.names import HubName, Quant
from ramify.runtime.model.hub.repository import Listing, listed
from ramify.runtime.model.hub.resolve import ModelFiles


def why_not(weights: Path) -> str | None:
    """Why the GGUF model `weights` does not run on this machine; None if it does."""
    found = inspected(ModelFiles("", weights, weights.parent), this_machine(), chat=False)
    return "; ".join(refusal.reason for refusal in found.refused) or None


def why_not_on_hub(listing: Listing, quant: Quant) -> str | None:
    """As `why_not`, by the headers of its files, unless its size alone says it."""
    memory = this_machine().memory
    if quant.size > memory:
        return f"it is larger than the memory, {memory / 2**30:.2f} GiB"
    return why_not(headers_of(listing, quant.files) / quant.files[0])


def files_to_inspect(name: str) -> tuple[ModelFiles, bool]:
    """The model's files, and whether they are whole: of a model that is on the hub alone, only headers are
    fetched. Raises as `resolve`."""
    fetched: list[Path] = []

    def headers(wanted: HubName, progress: bool) -> Path:
        listing = listed(wanted)
        paths, first = names.paths_on_hub(listing, progress)
        fetched.append(headers_of(listing, paths))
        return fetched[0] if first is None else fetched[0] / first

    files = names.resolve(name, from_hub=headers)
    return files, not fetched
