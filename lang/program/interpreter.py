"""The interpreter of a program's steps."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from ramify.constraint import choices
from ramify.decisions.answers import Answer
from ramify.errors import (
    BackendError,
    InvalidRequest,
    ProgramError,
    RamifyError,
    RequestTimeout,
    UnsupportedNode,
    fatal_cause,
)
from ramify.lang.calls.choices import SCORING, decide, token_length_normalized
from ramify.lang.calls.limits import Limits, deadline
from ramify.lang.calls.request import Output, all_of
from ramify.lang.calls.session import Target
from ramify.lang.calls.tool_turns import CallTurn, describe, form_of, open_calls
from ramify.lang.program import nodes
from ramify.lang.program.decisions import ask, gather, steps_before
from ramify.lang.program.events import Appended, StepEnded, StepFailed, StepStarted, Text
from ramify.lang.program.retries import attempt, final_value
from ramify.lang.program.sending import send
from ramify.lang.program.step_output import CallsOutput, StepOutput
from ramify.lang.program.tool_steps import (
    ToolFailed,
    in_turns,
    run_calls,
    send_calls,
    warn_of_untold,
)
from ramify.lang.program.variables import Skipped, Variable, skipped
from ramify.lang.prompt.chat import Content, begin_turn, end_turn
from ramify.lang.prompt.transcript import (
    Piece,
    append_output,
    append_pieces,
    append_text,
    pieces,
    text_of,
)
from ramify.lang.prompt.view import View
from ramify.lang.tools.forms import TaggedCalls
from ramify.lang.tools.tool import ToolCalls
from ramify.lang.trace.calls import Call
from ramify.lang.trace.outputs import meta_info
from ramify.lang.typed.decision import Decision
from ramify.messages import Choices, TextChunk
from ramify.sampling_options import resolve_options
from ramify.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ramify.lang.program.branch import Branch


class Interpreter(nodes.StepVisitor):
    """The interpreter of one branch's steps, which runs in the task or thread that may change the branch's
    content."""

    def __init__(self, branch: Branch) -> None:
        self._branch = branch
        self._run = branch.run

    # --- steps that do not wait ---

    def visit_Text(self, step: nodes.Text, variable: None) -> None:
        self._append_text(step.value)

    def visit_RoleBegin(self, step: nodes.RoleBegin, variable: None) -> None:
        self._append(begin_turn(self._branch.content, step.role, self._run.info, tools=step.tools))

    def visit_RoleEnd(self, step: nodes.RoleEnd, variable: None) -> None:
        self._append(end_turn(self._branch.content, step.role, self._run.info))

    def visit_ScopeBegin(self, step: nodes.ScopeBegin, variable: None) -> None:
        self._branch.scopes[step.name] = self._branch.content.tail

    def visit_ScopeEnd(self, step: nodes.ScopeEnd, variable: Variable) -> None:
        text = text_of(self._branch.content.tail, self._branch.scopes.pop(step.name))
        variable.resolve(text, text=text)

    def visit_Fork(self, step: nodes.Fork, variable: None) -> None:
        self._branch.call.children.extend(child.call for child in step.children)
        for child in step.children:
            child.call.parent = self._branch.call
            child.start_at_fork(self._branch)

    def visit_DescribeTools(self, step: nodes.DescribeTools, variable: None) -> None:
        self._append(describe(self._branch.content, self._run.home, step.tools))

    # --- steps that wait ---

    async def visit_Interpolated(self, step: nodes.Interpolated, variable: None) -> None:
        texts: list[str] = []
        for part in step.parts:
            if isinstance(part, str):
                texts.append(part)
                continue
            await part.variable.ready.wait()
            texts.append(part.read())
            if step.count is not None:
                step.count(texts[-1])
        self._append_text("".join(texts))

    async def visit_Splice(self, step: nodes.Splice, variable: None) -> None:
        if self._run.home.takes_messages and self._branch.content.dialogue.role is None:
            raise UnsupportedNode(
                f"{self._run.info.name} takes whole messages only: branches cannot be joined."
            )
        async with _within(None, self._branch.limits):
            for child in step.children:
                await child.idle().wait()
                if child.error is not None:
                    raise child.error
        content = self._branch.content
        for child in step.children:
            added = pieces(child.content.tail, child.fork_point)
            content = content.at(append_pieces(content.tail, added))
        self._append(content)

    async def visit_Gen(self, step: nodes.Gen, variable: Variable) -> None:
        branch = self._branch
        variable.kind = step.kind
        variable.thinking = None if step.node.thinking is None else ""
        with self._step("gen", step, variable) as call:
            view = await self._view(step, call)
            sampling = resolve_options(self._run.options, step.node.options)
            if step.node.stop:
                sampling = msgspec.structs.replace(sampling, stop=(*sampling.stop, *step.node.stop))
            variable.n = sampling.n
            async with _within(step.node.timeout, self._branch.limits):
                if step.retries:
                    await self._attempts(call, view.target, sampling, step, variable)
                    return
                outputs = await self._outputs(call, view, sampling, step, variable)
            values = [final_value(step, output.text) for output in outputs]
        first = outputs[0]
        branch.content = branch.after(branch.content, first)
        if step.node.thinking is not None:
            variable.thinking = first.thinking if sampling.n == 1 else [one.thinking for one in outputs]
        if sampling.n == 1:
            variable.resolve(values[0], text=first.text, meta=lambda: first.meta)
        else:
            variable.resolve(values, meta=lambda: [output.meta for output in outputs])

    async def _attempts(
        self, call: Call, target: Target, sampling: SamplingParams, step: nodes.Gen, variable: Variable
    ) -> None:
        """Generate with retries, and append the valid output. Only the valid output is streamed."""
        if sampling.n != 1:
            raise InvalidRequest("A gen with retries has n=1.", field="n")
        valid = await attempt(self._branch, call, target, sampling, step)
        output = valid.output
        self._append(valid.before)
        StepOutput(self._branch, variable).take(
            TextChunk(
                rid=output.rid,
                text=output.text,
                reasoning=output.thinking,
                ids=output.ids,
                usage=output.usage,
            )
        )
        self._branch.content = valid.content
        if step.node.thinking is not None:
            variable.thinking = output.thinking
        variable.resolve(valid.value, text=output.text, meta=lambda: output.meta)

    async def _outputs(
        self, call: Call, view: View[Target], sampling: SamplingParams, step: nodes.Gen, variable: Variable
    ) -> list[Output]:
        """The outputs of n independent generations. Only the first output is streamed."""
        node, shown = step.node, StepOutput(self._branch, variable)
        if sampling.n == 1:
            sent = send(
                self._branch,
                call,
                view,
                sampling,
                node.constraint,
                shown,
                thinking=node.thinking,
            )
            return [await sent]
        seeds = [None if sampling.seed is None else sampling.seed + index for index in range(sampling.n)]
        outputs = await all_of(
            send(
                self._branch,
                call.child("sample", call.name, call.prompt_end, self._run.clock()),
                view,
                msgspec.structs.replace(sampling, n=1, seed=seed),
                node.constraint,
                shown if index == 0 else None,
                next_use=None if index == 0 else "never",
                thinking=node.thinking,
            )
            for index, seed in enumerate(seeds)
        )
        call.text, call.finish = outputs[0].text, outputs[0].finish
        if node.thinking is not None:
            call.thinking = outputs[0].thinking
        return outputs

    async def visit_Select(self, step: nodes.Select, variable: Variable) -> None:
        branch = self._branch
        with self._step("select", step, variable) as call:
            view = await self._view(step, call)
            target = view.target
            if target.takes_messages:
                await self._constrained_select(call, view, step, variable)
                return
            async with _within(step.node.timeout, branch.limits):
                alone = step.method.requires_unconditional_logprobs
                scoring = Choices(texts=step.node.choices, unconditional=alone)
                output = await send(branch, call, view, SCORING, choices=scoring)
            chosen = decide(output.choices, call, step.node.choices, step.method)
            call.text = chosen.text
        by = None if target is self._run.home else target
        tail = append_output(branch.content.tail, chosen.text, chosen.ids, len(chosen.ids), "", by)
        self._append(branch.content.at(tail), step)
        variable.resolve(chosen.text, text=chosen.text, meta=lambda: chosen.meta)

    async def _constrained_select(
        self, call: Call, view: View[Target], step: nodes.Select, variable: Variable
    ) -> None:
        if step.method is not token_length_normalized:
            raise UnsupportedNode(
                f"{view.target.info.name} takes whole messages only, so it cannot score choices "
                f"by {step.method}."
            )
        branch, sampling = self._branch, SamplingParams(temperature=0.0)
        async with _within(step.node.timeout, branch.limits):
            output = await send(branch, call, view, sampling, choices(step.node.choices), unlimited=True)
        self._append(branch.after(branch.content, output), step)
        variable.resolve(output.text, text=output.text, meta=lambda: output.meta)

    async def visit_Decide(self, step: nodes.Decide, variable: Variable) -> None:
        branch = self._branch
        more = [] if step.node.append else await gather(branch, step)
        try:
            with self._step("decide", step, variable) as call:
                view = await self._view(step, call)
                steps = [step, *(one for one, _, _ in more if isinstance(one, nodes.Decide))]
                async with _within(step.node.timeout, branch.limits):
                    while True:
                        try:
                            rid, answers = await ask(branch, call, view, steps)
                            break
                        except (InvalidRequest, UnsupportedNode, BackendError) as error:
                            count = steps_before(error, steps)
                            if error.transient or not count:
                                raise
                        branch.put_back(more[count - 1 :])  # the failing step fails with its own line
                        more, steps = more[: count - 1], steps[:count]
                self._decide(rid, call, step, variable, answers.pop(0))
            while more:
                other, result, _ = more.pop(0)
                assert isinstance(other, nodes.Decide)
                assert result is not None
                try:
                    with self._step("decide", other, result) as shown:
                        shown.merged, shown.model, shown.prompt_end = True, call.model, call.prompt_end
                        self._decide(rid, shown, other, result, answers.pop(0))
                except ProgramError as error:
                    result.fail(error)
                    raise
        finally:
            branch.put_back(more)

    def _decide(
        self, rid: str, call: Call, step: nodes.Decide, variable: Variable, answers: Sequence[Answer]
    ) -> None:
        """Set `variable` to the decision of `answers`, and append its text if `step` says so."""
        found = step.decision(answers)
        call.decisions = (("", found),) if isinstance(found, Decision) else tuple(found.items())
        call.questions = tuple(one.question for one in step.asked.values())
        call.text = str(found)
        if step.node.append:
            self._append_text(str(found), step)
        plain, usage = found.to_dict(), call.usage
        text = json.dumps(plain, ensure_ascii=False)
        variable.resolve(found, text=text, meta=lambda: meta_info(rid, usage, None) | plain)

    async def visit_CallTools(self, step: nodes.CallTools, variable: Variable) -> None:
        branch, turns = self._branch, in_turns(self._branch)
        warn_of_untold(branch, step, turns)
        with self._step("gen", step, variable) as call:
            view = await self._view(step, call)
            form, target = form_of(view.target), view.target
            call.form = form if isinstance(form, TaggedCalls) else None
            opening = form.opening(step.node.required)
            opened = open_calls(view, opening, turns)
            self._feed(opened.content.tail, view.content.tail)
            sampling = resolve_options(self._run.options, step.node.options)
            constraint = form.constraint(step.tools, step.node.required, step.node.max_calls)
            async with _within(step.node.timeout, branch.limits):
                shown = CallsOutput(branch, variable, call, form, opening)
                output = await send_calls(branch, step, call, opened, sampling, constraint, shown)
            text, written = form.read(opening + output.text)
            shown.end(written)
        try:
            async with _within(None, branch.limits):
                ids = [shown.id(index) for index in range(len(written))]
                calls = await run_calls(branch, step, target, call, written, ids)
        except ToolFailed as error:
            raise _located(error, step, call) from error.__cause__
        done = CallTurn(opening, output, text, written, tuple(one.shown for one in calls), turns)
        begin = view.content.tail
        seen = text_of(opened.content.tail, begin) + output.text
        self._feed(done.write(view.content, target).tail, begin, seen)
        branch.content = done.append(branch.content, self._run.home)
        variable.resolve(ToolCalls(calls, text), text=opening + output.text, meta=lambda: output.meta)

    async def visit_Guarded(self, step: nodes.Guarded, variable: Variable | None) -> None:
        for guard in step.guards:
            await guard.value.variable.ready.wait()
            if (guard.value.read() in guard.among) == guard.negated:
                if variable is not None:
                    variable.fail(skipped(step.variable))
                return
        waiting = self.visit(step.step, variable)
        if waiting is not None:
            await waiting

    async def visit_Either(self, step: nodes.Either, variable: Variable) -> None:
        for source in step.sources:
            await source.ready.wait()
            if not isinstance(source.error, Skipped):
                variable.take(source)
                return
        variable.fail(skipped(step.name))

    # --- helpers ---

    def _append_text(self, text: str, by: nodes.ModelStep | None = None) -> None:
        content = self._branch.content
        self._run.home.check_text(content.dialogue, text)
        self._append(content.at(append_text(content.tail, text)), by)

    def _append(self, content: Content, by: nodes.ModelStep | None = None) -> None:
        """Make `content`, which continues that of the branch, the content. `by` is the step whose output the
        new text is; None for text of the program."""
        self._feed(content.tail, self._branch.content.tail, by=by)
        self._branch.content = content

    def _feed(
        self, tail: Piece | None, since: Piece | None, seen: str = "", by: nodes.ModelStep | None = None
    ) -> None:
        """Note the text after `since` up to `tail`. `seen` is the beginning of this text that has been
        noted."""
        text, path = text_of(tail, since, later=True).removeprefix(seen), self._branch.path
        if text:
            self._branch.note(Appended(text, path) if by is None else Text(by.variable, text, path))

    @contextlib.contextmanager
    def _step(
        self, kind: Literal["gen", "select", "decide"], step: nodes.ModelStep, variable: Variable
    ) -> Iterator[Call]:
        """A ``with`` block whose variable is a new call for `step`. An error in the block is raised as a
        `ProgramError` with the step's line, prompt and output."""
        branch = self._branch
        call = branch.call.child(
            kind, step.variable or "", branch.content.tail, self._run.clock(), line=step.line
        )
        variable.call = call
        branch.note(StepStarted(step.variable, branch.path))
        variable.ready.on_set(lambda: self._note_end(variable))
        try:
            yield call
        except asyncio.CancelledError:
            call.error = "cancelled"
            raise
        except Exception as error:
            call.error = str(error)
            located = _located(error, step, call)
            if (fatal := fatal_cause(error)) is not None:
                fatal.message = located.message
            raise located from (error.__cause__ if isinstance(error, ProgramError) else error)
        finally:
            call.end_s = self._run.clock()

    def _note_end(self, variable: Variable) -> None:
        name, error, path = variable.name, variable.error, self._branch.path
        self._branch.note(
            StepEnded(name, variable.value, path) if error is None else StepFailed(name, error, path)
        )

    async def _view(self, step: nodes.ModelStep, call: Call) -> View[Target]:
        """The content of the branch as the model of `step` reads it. Sets the fields of `call` that
        depend on the model."""
        target = await self._run.target(step)
        view = self._branch.view(target)
        call.model, call.prompt_end = target.name, view.content.tail
        call.priority, call.lora = step.node.priority, step.node.lora
        return view


@contextlib.asynccontextmanager
async def _within(seconds: float | None, limits: Limits) -> AsyncIterator[None]:
    """A ``with`` block that is cancelled after `seconds` (None: never), and then raises `RequestTimeout`. If
    the time of a limit ends earlier, the block is cancelled at that time, and raises `BudgetExceeded`."""
    until = deadline(limits)
    first = until is not None and (seconds is None or until.seconds_left < seconds)
    try:
        async with asyncio.timeout(until.seconds_left if until is not None and first else seconds) as scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        if until is not None and first:
            raise until.limit.time_is_over() from None
        raise RequestTimeout(
            f"It took longer than {seconds:g} s.",
            field="timeout",
            remedy="Raise timeout or lower max_tokens.",
        ) from None


def _located(error: Exception, step: nodes.ModelStep, call: Call) -> ProgramError:
    what = f"{call.kind} {step.variable!r}" if step.variable else f"A {call.kind}"
    where = f" at {step.line}" if step.line else ""
    kind = type(error) if isinstance(error, ProgramError) else ProgramError
    message = error.told if isinstance(error, RamifyError) else str(error) or type(error).__name__
    return kind(
        f"{what}{where} failed: {message}",
        variable=step.variable,
        line=step.line,
        prompt=call.prompt,
        partial=call.text,
        finish_reason=call.finish.reason if call.finish else None,
        field=getattr(error, "field", None),
        pointer=getattr(error, "pointer", None),
        remedy=getattr(error, "remedy", None),
    )
