"""Fills the grammar masks of a step beside its forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ramify.errors import EngineError, RamifyError
from ramify.runtime.processes.worker_process import log
from ramify.runtime.scheduler.request import Request


class MaskFiller:
    """One thread: the walk over the vocabulary and the forward pass both leave the interpreter free."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._filling: Future[None] | None = None
        self._errors: dict[str, RamifyError] = {}

    def begin(self, requests: Sequence[Request]) -> None:
        """Fill the masks of those that are constrained; their matchers are not to be touched until `wait`."""
        self._errors.clear()
        if any(request.constrained is not None for request in requests):
            self._filling = self._thread.submit(self._fill, requests)

    def wait(self) -> None:
        if self._filling is not None:
            self._filling.result()
            self._filling = None

    def fill_now(self, requests: Sequence[Request]) -> None:
        self._errors.clear()
        self._fill(requests)

    def error(self, request: Request) -> RamifyError | None:
        """Why the mask of `request` could not be filled."""
        return self._errors.get(request.rid)

    def _fill(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.constrained is None:
                continue
            try:
                # The end of a prompt that is being healed may stay as it is, and costs no token then.
                request.constrained.fill(request.budget_left, may_be_empty=request.healing is not None)
            except RamifyError as error:
                self._errors[request.rid] = error
            except Exception as error:
                log.exception("the grammar of %s failed", request.rid)
                self._errors[request.rid] = EngineError(f"The grammar failed: {error}")
