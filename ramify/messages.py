"""Messages between clients and the runtime: what a program or the HTTP server asks for, and what it gets.

A client sends `Generate` and receives `TextChunk`s, the last of which has `finish` set. Messages that only
the processes of the engine core exchange are in `ramify.engine_messages`. All are frozen msgspec structs;
this module needs the standard library and msgspec alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ramify.constraint import Constraint
from ramify.errors import InvalidRequest
from ramify.sampling_params import SamplingParams

Segment = str | tuple[int, ...]
"""A piece of a prompt: text still to be tokenised, or token ids to be taken as they are."""

FinishReason = Literal["stop", "length", "abort"]

HELD_S = 0.5
"""Seconds for which text is held back where nobody follows it while it is generated (`Generate.every_s`)."""

NextUse = Literal["soon", "join", "tool", "unknown", "never"]
"""The next use of a request's pages by its program, soonest first: in its next step, after sibling branches
have finished, after a tool has returned, at an unknown time, or not at all."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of all messages; the tag is the class name."""


class LimitHint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A limit of a program, or of a block of it, towards which a request counts."""

    id: str
    """The id that all requests towards this limit share."""
    max_total_tokens: int | None = None
    """Most prompt and output tokens of all its requests together, as `Usage` counts them."""
    seconds_left: float | None = None
    """Seconds from the arrival of this request to the end of the limit's time."""


class ProgramHint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hint to the runtime about the program that a request belongs to."""

    program: str
    """Id of the run; its leases end with `EndProgram`."""
    name: str = ""
    """The program's name, for people; programs of one name are expected to need about the same service."""
    lease_s: float = 0.0
    """Seconds for which this request's pages are leased after its end; with 0 they are not."""
    path: tuple[str, ...] = ()
    """Names of the forks and steps from the program down to this request, for people to read."""
    next_use: NextUse = "unknown"
    """The next use of these pages, which places the lease in the order of eviction. "never": no lease."""
    branch: str = ""
    """The branch of the program that asks. Each branch has leases of its own."""
    forks: tuple[str, ...] = ()
    """The forks that the branch comes from, outermost first. The common prefix of the prompts of all branches
    of a fork is kept for the join."""
    ended: tuple[str, ...] = ()
    """Branches and forks that have ended: their leases end."""
    parts: tuple[tuple[int, int], ...] = ()
    """Places at which later prompts of the program part from this one: (segments of the prompt, characters of
    the next segment). A model with linear attention layers keeps its state there."""
    calls_left: int | None = None
    """The number of calls of the program after this one; None where it is not known."""
    limits: tuple[LimitHint, ...] = ()
    """The limits that the request counts for, outermost first. Past one of them it ends: see `Finish`."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of the model."""

    id: str
    name: str
    arguments: str
    """JSON text."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls at the end of an assistant turn, after its content."""
    tool_call_id: str = ""
    """The id of the call whose result is the content of a tool turn."""
    name: str = ""
    """The tool's name in a tool turn, where it is known."""
    reasoning: str = ""
    """The reasoning of an assistant turn before its content; chat templates render it or leave it out."""


class Preamble(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Free text before the constrained part: reasoning, or text before a tool call.

    It ends with the text `end`, which is part of the output. With `start` the prompt is made to end in that
    text, whether or not the chat template writes it.
    """

    end: str
    start: str = ""
    max_tokens: int | None = None
    """The most tokens of free text before `end` is forced; with 0 the output begins with `end`."""
    optional: bool = False
    """The output may stop without `end`, and without anything that would follow it."""
    apart: bool = False
    """The sampling options hold for the text after this one: `max_tokens` and `min_tokens` count from there,
    and stop strings and stop tokens end the output only there. This text then has a `max_tokens` of its own,
    unless it is `counted`."""
    counted: bool = False
    """`max_tokens` of the sampling options counts the tokens of this text too, although it is `apart`, as
    OpenAI's API counts reasoning."""
    end_ids: tuple[int, ...] = ()
    """The tokens of `end`, filled in by the tokenizer."""

    @property
    def uncounted(self) -> bool:
        """True where `max_tokens` of the sampling options does not count the tokens of this text."""
        return self.apart and not self.counted


Effort = Literal["minimal", "low", "medium", "high"]


class Thinking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The reasoning that a request asks for: on or off, its budget, its effort."""

    enabled: bool = True
    max_tokens: int | None = None
    """The most tokens of the thoughts."""
    effort: Effort | None = None
    """The effort, for OpenAI's models. Other models have no such setting."""

    def check(self) -> Thinking:
        """Return self; raises `InvalidRequest` for a wrong number of tokens."""
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidRequest(
                f"thinking.max_tokens is {self.max_tokens}; it must be 0 or more.",
                field="thinking.max_tokens",
            )
        return self


class Choices(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Texts to be scored behind a prompt: the log-probability of each, token by token. Nothing is
    generated."""

    texts: tuple[str, ...]
    unconditional: bool = False
    """Score each text without the prompt as well."""


Pooling = Literal["last", "mean"]
"""The embedding of a text, of its tokens' hidden states after the final norm: that of the last token, or the
mean of all."""


class Continuation(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The output of a request on an engine that has died; the request goes on behind it."""

    ids: tuple[int, ...]
    replaced: int = 0
    """The field of the same name in `TextChunk`; so are `forced` and those below."""
    forced: tuple[int, ...] = ()


class Generate(Message, frozen=True, kw_only=True):
    """One generation. Either `prompt` or `chat` is given; `sampling.n` is 1 here (the frontend fans out)."""

    rid: str
    prompt: tuple[Segment, ...] = ()
    chat: tuple[ChatMessage, ...] | None = None
    """Turns of a chat, rendered with the model's own template and followed by its generation prompt."""
    tools: str = ""
    """JSON text of the list of tools that the chat template is given; empty for none."""
    template_kwargs: str = ""
    """JSON text of the object of further variables that the chat template is given."""
    preambles: tuple[Preamble, ...] = ()
    """Texts before the constrained part, in their order in the output. The constraint holds behind the last
    one; without a constraint any text is allowed there."""
    thinking: Thinking | None = None
    """The reasoning asked for, for backends that take messages and switch the model's thinking themselves.
    Others get `preambles`."""
    sampling: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    choices: Choices | None = None
    """Choices to score instead of a generation: `sampling.max_tokens` is 0 then, and there is no constraint.
    Where `sampling.token_healing` is off the prompt ends on a token, and no choice reaches into it."""
    pooling: Pooling | None = None
    """The pooling of an embedding of the prompt, computed instead of a generation: `sampling.max_tokens` is 0
    then, and there are no constraint, preambles and choices."""
    hint: ProgramHint | None = None
    scope: str = ""
    """Cache scope: pages are shared only between requests of the same scope."""
    lora: str = ""
    """The name of a LoRA adapter; empty for the model alone. Requests of different adapters share no
    pages."""
    lora_revision: str = ""
    """The revision of the adapter, set by the frontend. With another revision the request fails."""
    every_s: float = 0.0
    """The least time between two chunks, in seconds. Where nobody shows text while it is generated, fewer
    chunks leave more processor time for the model."""
    priority: int = 0
    """Higher goes first; see `ramify.priority`."""
    flow: str = ""
    """Requests of one flow share a place in the queue, as those of one body do. The requests of a program are
    one; any other request without a flow is alone."""
    continues: Continuation | None = None
    """The chunks begin with this output again. With `sampling.seed`, what follows is what would have
    followed."""


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Log-probabilities (natural log, of the unmodified distribution) of a run of tokens.

    All lists have one entry per token. `logprobs` holds None for the first token of a prompt.
    """

    ids: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """The most likely (id, logprob) pairs per token, best first; empty when none were asked for."""
    texts: tuple[str, ...] = ()
    """The text of each token (`ramify.text.token_text`), filled in by the detokenizer."""
    top_texts: tuple[tuple[str, ...], ...] = ()
    offsets: tuple[int, ...] = ()
    """The place of each output token: its first character in the output's text, filled in by the detokenizer.
    Empty for a prompt."""


def concatenated(parts: Sequence[TokenLogprobs | None]) -> TokenLogprobs | None:
    """The log-probabilities of `parts` as one run of tokens; None where all are None."""
    present = [part for part in parts if part is not None]
    if len(present) <= 1:
        return present[0] if present else None
    return TokenLogprobs(
        **{
            field: tuple([entry for part in present for entry in getattr(part, field)])
            for field in TokenLogprobs.__struct_fields__
        }
    )


class ChoiceScore(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The score of one of the `Choices`."""

    tokens: TokenLogprobs
    """The first token may begin with the end of the prompt, which it replaces (token healing)."""
    behind: bool = True
    """The tokens follow those of the whole prompt; False where the choice replaces some of them."""
    unconditional: TokenLogprobs | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens and times of one request. prompt = cached + computed prompt tokens."""

    prompt_tokens: int = 0
    """Tokens of the prompt. Scored choices add their tokens that have to be computed, each once."""
    cached_tokens: int = 0
    """Prompt tokens whose KV pages were found in the tree."""
    distinct_tokens: int = 0
    """Prompt tokens that no earlier request of the same program had computed or was computing. Their sum over
    a program is the number of distinct tokens in its tree of calls. Without a program: all prompt tokens."""
    evicted_tokens: int = 0
    """Prompt tokens that were in the tree once and had to be computed again because they had been evicted."""
    evicted_by: str = ""
    """The program's name and id, or the request's id, that took most of these pages."""
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Completion tokens of the thoughts, with their end mark, where they are told apart."""
    forced_tokens: int = 0
    """Completion tokens that the grammar forced, appended without sampling."""
    draft_tokens: int = 0
    """Draft tokens of speculative decoding that were verified."""
    accepted_tokens: int = 0
    """Draft tokens that were accepted: completion tokens that took no step of their own."""
    model_draft_tokens: int = 0
    """Draft tokens that a draft model proposed; the others were looked up."""
    model_accepted_tokens: int = 0
    """Accepted draft tokens that a draft model proposed."""
    stored_tokens: int = 0
    """Prompt and completion tokens of answers from a store (`ramify.answers`). Nothing was computed for them,
    and no other field counts them."""
    retractions: int = 0
    queue_s: float = 0.0
    """Arrival at the scheduler to the first forward pass."""
    first_token_s: float = 0.0
    """Arrival at the scheduler to the first output token."""
    total_s: float = 0.0
    """Arrival at the scheduler to the end."""

    @property
    def writing_s(self) -> float:
        """Seconds from the first output token to the end; 0 where the backend does not tell when that
        came."""
        return self.total_s - self.first_token_s if self.first_token_s else 0.0


class ReachedLimit(msgspec.Struct, frozen=True, kw_only=True):
    """A limit that ended a request."""

    id: str
    """The id of its `LimitHint`."""
    tokens: int
    """Prompt and output tokens that all requests of the limit had taken by then."""
    timed_out: bool
    """True where its time was over; False where its tokens were used up."""


class Finish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of a generation; `matched` is the stop string or stop token id that ended it."""

    reason: FinishReason
    matched: str | int | None = None
    limit: ReachedLimit | None = None
    """The limit of its program that ended it, with reason "abort"."""


class Unenforced(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A schema keyword that the grammar leaves out, as was asked for (`Constraint.strict`)."""

    schema: str
    """JSON pointer of the keyword."""
    message: str
    tool: str = ""
    """The name of the tool whose parameters have the keyword; "" where it is no tool's."""


class Enforcement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Differences between a grammar and its constraint."""

    backend: str = "ramify"
    """The library that compiled it: ramify, xgrammar, llguidance or outlines."""
    unenforced: tuple[Unenforced, ...] = ()
    """Keywords of the schema that it leaves out: it allows more."""
    narrowed: tuple[str, ...] = ()
    """Valid texts that it does not allow, a sentence for each kind of them."""
    whole: bool = True
    """An output that runs out of tokens is complete. Otherwise it may be cut."""

    def fields(self) -> dict[str, Any]:
        """The fields of a response that report the differences; none where Ramify's own engine enforces
        everything."""
        told: dict[str, Any] = {"unenforced": list(self.unenforced)} if self.unenforced else {}
        if self.backend != "ramify":
            told |= {"grammar_backend": self.backend, "narrowed": list(self.narrowed)}
            told["may_be_cut"] = not self.whole
        return told


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """A schema keyword that an output does not satisfy."""

    instance: str
    """JSON pointer into the output."""
    schema: str
    """JSON pointer of the keyword."""
    message: str


class TextChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New text of one request. The last one has `finish` set.

    A stop string can end the visible text inside a token: `kept_ids` counts the output ids whose
    text is wholly visible, and `tail` is the visible text after them, so that the visible output is
    exactly ``decode(ids[:kept_ids]) + tail``. Both are set with `finish`. Where the first output token
    replaces the end of the prompt (token healing), all of the text is in `tail`.
    """

    rid: str
    text: str = ""
    reasoning: str = ""
    """New text of the model's thoughts, where the backend tells them apart; it is no part of `text`."""
    ids: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    """Indices in `ids` of the tokens that the grammar forced, where the backend tells."""
    pieces: tuple[tuple[int, int], ...] = ()
    """The correspondence of `ids` and `text` in a chunk of several steps: (ids, characters) of one piece
    after the other. Empty: all ids and all text are one piece."""
    controls: tuple[int, ...] = ()
    """Places in `text`, in characters, at which the spelling of a special token begins. The same characters
    in tokens of text are not listed."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    choices: tuple[ChoiceScore, ...] = ()
    """A score for each choice, in their order; set with `finish` where choices are scored."""
    usage: Usage | None = None
    """The usage; set with `finish`, and on the first chunk of a request whose chunks are held back."""
    finish: Finish | None = None
    kept_ids: int = 0
    tail: str = ""
    replaced: int = 0
    """Number of tokens at the end of the prompt that the first id replaces (token healing); on the first
    chunk."""
    enforcement: Enforcement | None = None
    """Differences between the grammar and the constraint, on the first chunk of a constrained output."""
    embedding: bytes = b""
    """The embedding, set with `finish` where one was asked for: (hidden size,) float32, little-endian, not
    normalised."""
    violations: tuple[Violation, ...] | None = None
    """Keywords that the output does not satisfy; set with `finish` where the output is validated
    afterwards."""


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and the current state. Pages: free + evictable + leased + in_use == total."""

    running: int
    waiting: int
    compiling: int
    """Requests that wait for their grammar."""
    steps: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    """Tokens whose KV was computed: prompts, outputs, and again those that a retraction had dropped."""
    output_tokens: int
    forced_tokens: int
    draft_tokens: int
    """Draft tokens of speculative decoding that were computed; `computed_tokens` counts them too."""
    accepted_tokens: int
    """Draft tokens that were accepted."""
    model_draft_tokens: int = 0
    """Draft tokens that the draft model proposed; the others were looked up."""
    model_accepted_tokens: int = 0
    """Accepted draft tokens that a draft model proposed."""
    draft_model_tokens: int = 0
    """Tokens that went through the draft model."""
    draft_model_s: float = 0.0
    """Seconds of its passes; part of `step_s`."""
    retractions: int
    evicted_pages: int
    pages_total: int
    pages_free: int
    pages_evictable: int
    pages_leased: int
    pages_in_use: int
    page_size: int
    states_total: int = 0
    """Slots for the states of linear attention layers: free + held + in_use == total."""
    states_free: int = 0
    states_held: int = 0
    """States in the prefix tree, from which later requests can begin."""
    states_in_use: int = 0
    """States of running requests."""
    evicted_states: int = 0
    exported_tokens: int = 0
    """Tokens whose KV pages were written as KV snapshots for other replicas."""
    exported_bytes: int = 0
    imported_tokens: int = 0
    """Tokens whose KV pages came from KV snapshots of other replicas."""
    imported_bytes: int = 0
    refused_imports: int = 0
    """KV snapshots that were damaged, of another model or engine, or found no room."""
    step_s: float
    """Seconds spent in steps."""
    model_s: float
    """Seconds spent in forward passes, logits and scoring; part of `step_s`."""


class ToolPieces(msgspec.Struct, frozen=True, kw_only=True):
    """The pieces in which the chat template writes tools and results, in a conversation that begins with a
    system turn."""

    start: str
    """Text before the system content when there are tools."""
    place: Literal["system", "user"]
    """The tools stand at the end of the system content, or at the beginning of the user turn after it."""
    before: str
    between: str
    after: str
    """Text before, between and after the tools, each of which is JSON."""
    indent: int | None
    """Indent of the JSON of a tool, in spaces; None: all in one line."""
    quoted: bool
    """A result is shown as a JSON string, whose quotes belong to the pieces of the tool turn."""


class ThinkingFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The marks of a model's thoughts, and their treatment by its chat template.

    An assistant turn begins with `ChatFormat.prefix`, whose end is `default` (may be ""). In its place stands
    `on` where the model is to think, `off` where it is not, and `past` in an earlier turn without thoughts.
    """

    start: str = "<think>\n"
    """Begins the thoughts. `on` ends with it."""
    end: str = "</think>"
    gap: str = "\n\n"
    """Between `end` and the answer."""
    default: str = ""
    on: str = "<think>\n"
    off: str = ""
    past: str = ""
    channels: bool = False
    """Thoughts and answer are messages of one turn, each with the name of its channel, as gpt-oss writes
    them. The prefix of an assistant turn leads into the channel of answers; `default` is the text that does.
    """
    kept: Literal["turn", "user", "always"] = "turn"
    """The time for which thoughts stay in the prompt: up to the end of their turn, up to the next user turn,
    or for ever."""


class ChatFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The model's chat template as pieces that can be appended one turn at a time.

    A conversation is ``prefix[">system"] + content + suffix["system"] + prefix["system>user"] + …``:
    `prefix` is keyed by "previous role>role" (empty previous role at the start, where a template may
    insert a default system turn), `suffix` by role.
    """

    prefix: dict[str, str]
    suffix: dict[str, str]
    exact: bool
    """The pieces gave the same text as the Jinja template for every probe conversation."""
    tool_format: str = "generic"
    """Name of the format that the template writes tool calls in (`ramify.tool_calls.formats`)."""
    tools: ToolPieces | None = None
    """The pieces of tools and results; None where they cannot be appended one by one as the template writes
    them."""
    difference: str = ""
    """The first probe conversation that differs, in both forms, where `exact` is False."""
    variables: tuple[str, ...] = ()
    """Variables that the template reads, other than messages, tools, special tokens and
    add_generation_prompt."""
    thinking: ThinkingFormat | None = None
    """The marks of thoughts; None where the template has no sign of thinking."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The served model."""

    name: str
    path: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    device: str
    chat_format: ChatFormat | None
    """The chat template as pieces; None when the model has none."""
    model_impl: str = "native"
    """The code that computes the model: native or transformers."""
    fingerprint: str = ""
    """Changes with whatever may change an answer: weights, tokenizer, number formats. Empty: not known."""
    max_running: int = 0
    """Requests in one batch of a replica, and `chunk_tokens`: prompt tokens in one of its steps."""
    chunk_tokens: int = 0
    page_size: int = 0
    """Tokens of a KV page."""
    pooling: str = "last"
    """The pooling that the model's folder names for embeddings: a `Pooling`, or the name of one that is not
    served."""
