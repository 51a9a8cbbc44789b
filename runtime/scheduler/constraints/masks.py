"""Fills the grammar masks of a step in a thread, while the forward pass runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ramify.errors import EngineError, RamifyError
from ramify.runtime.scheduler.request import Request

log = logging.getLogger("ramify")


class MaskFiller:
    """One thread is enough: walks over the token trie and the forward pass both release the GIL."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._filling: Future[None] | None = None
        self._errors: dict[str, RamifyError] = {}

    def begin(self, requests: Sequence[Request]) -> None:
        """Start to fill the masks of `requests`, all constrained, whose matchers must not be used until
        `wait`."""
        self._errors.clear()
        if requests:
            self._filling = self._thread.submit(self._fill, requests)

    def wait(self) -> None:
        if self._filling is not None:
            self._filling.result()
            self._filling = None

    def fill_now(self, requests: Sequence[Request]) -> None:
        self._errors.clear()
        self._fill(requests)

    @property
    def errors(self) -> Mapping[str, RamifyError]:
        """By the id of each request whose mask could not be filled."""
        return self._errors

    def _fill(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.constrained is None:
                continue
            try:
                # A prompt that is being healed may keep its last token, which the mask need not allow.
                request.constrained.fill(request.budget_left, may_be_empty=request.healing is not None)
            except RamifyError as error:
                self._errors[request.rid] = error
            except Exception as error:
                log.exception("the grammar of %s failed", request.rid)
                self._errors[request.rid] = EngineError(f"The grammar failed: {error}")
