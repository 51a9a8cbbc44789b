"""Arrival of requests: limits, token healing, and the wait for a grammar, up to the queue for admission."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from ramify.engine_messages import GrammarFailed, GrammarReady, Submit
from ramify.errors import InvalidRequest, RamifyError
from ramify.runtime.model.lora.adapters import Adapters
from ramify.runtime.model.tokenizer.end_tokens import no_end_token
from ramify.runtime.scheduler.lifecycle import Lifecycle
from ramify.runtime.scheduler.outputs import OutputAppender
from ramify.runtime.scheduler.requests.choices import ChoiceTree, ScoringState
from ramify.runtime.scheduler.requests.constrained import MAX_TOKENS, ConstrainedOutput, Healer, Healing
from ramify.runtime.scheduler.requests.limits import Limits
from ramify.runtime.scheduler.requests.request import Request
from ramify.runtime.scheduler.results import Scorer

if TYPE_CHECKING:
    from ramify.grammar.matcher import Grammar
    from ramify.grammar.retokenize import Retokenizer
    from ramify.runtime.scheduler.grammars import GrammarStore


@dataclasses.dataclass(eq=False)
class Arrivals:
    """Turns `Submit` messages into requests. A request with a constraint is enqueued when its grammar is
    compiled.

    retokenizer : spells forced text as the tokenizer does; if None, only single tokens are forced
    healer : has the masks for token healing; if None, prompts are not healed
    """

    limits: Limits
    adapters: Adapters
    grammars: GrammarStore
    retokenizer: Retokenizer | None
    healer: Healer | None
    requests: Lifecycle
    appender: OutputAppender
    scorer: Scorer
    clock: Callable[[], float]

    def submit(self, message: Submit) -> None:
        choices = adapter = None
        try:
            if message.lora:
                adapter = self.adapters.find(message.lora, message.lora_revision)
            max_tokens = self.limits.max_tokens(message)
            if message.constraint is not None and not self.limits.eos_token_ids:
                raise no_end_token()
            if message.choices:
                choices = ChoiceTree(message)
                self.limits.check_choices(choices.longest, choices.tokens)
                message = msgspec.structs.replace(message, ids=choices.ids)
        except RamifyError as error:
            self.requests.refuse(message.rid, error)
            return
        request = Request(message, arrival=self.clock(), max_tokens=max_tokens, adapter=adapter)
        if message.open_end:
            self._heal(request)
        if choices is not None:
            request.scoring = ScoringState(choices, choices.first, request)
        self.requests.arrive(request)
        if choices is not None:
            with self.requests.failing_alone(request):
                self.scorer.begin_scoring(request, choices)
        elif request.constraint is not None:
            found = self.grammars.request(request.rid, request.constraint)
            if found is None:
                self.requests.compiling[request.rid] = request
            else:
                self._begin(request, found)
        else:
            self._begin(request, None)

    def grammar_answered(self, message: GrammarReady | GrammarFailed) -> None:
        self._begin_all(self.grammars.deliver(message))

    def compiler_died(self) -> None:
        self._begin_all(self.grammars.compiler_died())

    def _heal(self, request: Request) -> None:
        sampling = request.sampling
        if self.healer is None or not sampling.token_healing or sampling.prompt_logprobs_start is not None:
            return
        if request.max_tokens > 0 and (end := self.healer.open_end(request.ids[-MAX_TOKENS - 1 :].tolist())):
            request.heal(Healing(self.healer, end.text), end.tokens)

    def _begin_all(self, outcomes: Sequence[tuple[str, Grammar | RamifyError]]) -> None:
        for rid, outcome in outcomes:
            request = self.requests.compiling.pop(rid, None)
            if request is not None:
                self._begin(request, outcome)

    def _begin(self, request: Request, grammar: Grammar | RamifyError | None) -> None:
        with self.requests.failing_alone(request):
            if isinstance(grammar, RamifyError):
                raise grammar
            if grammar is not None or request.preambles:
                self._constrain(request, grammar)
            if request.continues is not None:
                self.appender.replay(request, request.continues)
            if request.constrained is not None and request.max_tokens > 0 and request.healing is None:
                self.appender.jump(request, loose=0)
            begun = request.output_len > 0 and not request.wants_prompt_logprobs
            if not (begun and self.appender.end_if_done(request)):
                self.requests.enqueue(request)

    def _constrain(self, request: Request, grammar: Grammar | None) -> None:
        """Give `request` a matcher. Raises `InvalidRequest` if `max_tokens` is too small for the
        constraint."""
        request.report.enforcement = None if grammar is None else grammar.enforcement
        prefix = b"" if request.healing is None else request.healing.rest
        matcher = self.grammars.matcher(grammar, request.preambles, prefix)
        request.constrained = constrained = ConstrainedOutput(
            matcher, self.limits.vocab_size, self.limits.eos_token_ids, self.retokenizer
        )
        needed, most = constrained.needed - request.known_len, request.max_tokens
        if request.answer_tokens is not None:
            needed -= sum(len(one.end_ids) for one in request.preambles if one.uncounted)
            most = request.answer_tokens
        if 0 < most < needed:
            what = _NAMES["" if request.constraint is None else request.constraint.kind]
            raise InvalidRequest(
                f"The shortest answer that fits {what} has {needed} tokens; max_tokens is {most}.",
                field="max_tokens",
                remedy=f"Allow at least {needed} tokens.",
            )


_NAMES = {
    "": "the preambles",
    "json_schema": "the schema",
    "json_object": "a JSON object",
    "regex": "the regular expression",
    "ebnf": "the grammar",
    "lark": "the grammar",
    "choices": "the choices",
    "structural_tag": "the tools or the structural tag",
}
"""Names of constraints in error messages, by kind of constraint; "" for preambles alone."""
