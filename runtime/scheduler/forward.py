"""One forward pass over the tokens that a step has scheduled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.runner import Runner
from ramify.runtime.scheduler.constraints.masks import MaskFiller
from ramify.runtime.scheduler.overlap import OverlapScheduling
from ramify.runtime.scheduler.request import ScheduledRequest
from ramify.runtime.scheduler.speculation.draft_model import DraftModel
from ramify.runtime.scheduler.states import RequestStates


@dataclasses.dataclass(eq=False)
class ForwardPass:
    """Runs passes, and fills the grammar masks of the tokens to come meanwhile."""

    runner: Runner
    masks: MaskFiller
    overlap: OverlapScheduling
    states: RequestStates
    page_size: int
    draft_model: DraftModel | None = None

    def run(self, plan: Sequence[ScheduledRequest]) -> torch.Tensor:
        """(tokens, hidden size): the states of the scheduled tokens, in the order of `plan`.

        States that the pass before has computed ahead are taken from there.
        """
        ahead = self.overlap.take(plan)
        rest = [scheduled for scheduled, row in zip(plan, ahead.rows, strict=True) if row is None]
        copies = []
        extensions = []
        for request, stop in rest:
            pages = request.pages
            if pages.copy is not None:
                copies.append(pages.copy)
                pages.copy = None
            start, ids = request.computed_len, request.target_ids
            extensions.append(Extension(ids, start, stop, pages.ids, pages.state, request.lora))
            pages.state_len = stop
        if self.states.present:
            self.runner.copy_states(self.states.copies.take())
        if self.draft_model is not None:
            self.draft_model.wrote(plan, copies)
        self.masks.begin(
            [
                scheduled.request
                for scheduled in plan
                if scheduled.request.constrained is not None and scheduled.samples
            ]
        )
        try:
            computed = self.runner.forward(pack(extensions, self.page_size, copies)) if rest else None
        finally:
            self.masks.wait()
        return ahead.joined(computed, [stop - request.computed_len for request, stop in plan])
