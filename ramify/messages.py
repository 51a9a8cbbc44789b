"""Messages between clients and the runtime: the requests of programs and of the HTTP server, and the answers.

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
from ramify.fill import Fill
from ramify.questions import Decide, DecisionScores
from ramify.sampling_params import SamplingParams

Segment = str | tuple[int, ...]
"""A piece of a prompt: text still to be tokenised, or token ids to be taken as they are."""

FinishReason = Literal["stop", "length", "abort"]

HELD_S = 0.5
"""`Generate.every_s` of requests whose text nobody watches while it is generated, in seconds."""

NextUse = Literal["soon", "join", "tool", "unknown", "never"]
"""The time at which the program uses a request's pages again. From soonest to latest: in the next step, after
sibling branches have finished, after a tool has returned, at an unknown time, never."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of all messages. The tag of a message is its class name."""


class LimitHint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A limit of a program, or of a block of a program, towards which a request counts."""

    id: str
    """Id of the limit, the same in all requests that count towards it."""
    max_total_tokens: int | None = None
    """Most prompt and output tokens of all requests of the limit together, as `Usage` counts them."""
    seconds_left: float | None = None
    """Seconds from the arrival of this request until the time of the limit is over."""


class ProgramHint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hint to the runtime about the program that a request belongs to."""

    program: str
    """Id of the program run. The leases of the run end with `EndProgram`."""
    name: str = ""
    """The program's name, for people. The scheduler expects programs with the same name to need about the
    same service."""
    lease_s: float = 0.0
    """Seconds for which the request's pages are leased after the request has ended; 0 for no lease."""
    path: tuple[str, ...] = ()
    """Names of the forks and steps from the program down to this request, for people to read."""
    next_use: NextUse = "unknown"
    """The next use of the request's pages. It determines the place of the lease in the order of eviction.
    "never": no lease."""
    branch: str = ""
    """The program's branch that sends the request. Each branch has leases of its own."""
    forks: tuple[str, ...] = ()
    """The forks from which the branch comes, outermost first. The common prefix of the prompts of all
    branches of a fork is kept for the join."""
    ended: tuple[str, ...] = ()
    """Branches and forks that have ended, so that their leases are released."""
    parts: tuple[tuple[int, int], ...] = ()
    """Places at which later prompts of the program diverge from this one: (number of whole segments of the
    prompt, characters of the next segment). For a model with linear attention layers, the state at these
    places is kept."""
    calls_left: int | None = None
    """Number of calls that the program makes after this one; None if it is not known."""
    limits: tuple[LimitHint, ...] = ()
    """The limits towards which the request counts, outermost first. Any of them ends it (`Finish.limit`)."""
    session: bool = False
    """True for a program without a known end: the order of admission takes each request alone."""
    pinned: bool = False
    """Whether the lease is a pin: its pages are not evicted until it is over or the program ends. The request
    is refused if pins would hold more than `max_pinned_share` of the KV pages."""
    client: str = ""
    """Name of the client that sent the request. A server sets it by the headers."""
    max_pinned_share: float = 1.0
    """Share of the KV pages that pins of the request's API key may hold. A server with keys sets it."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call made by the model."""

    id: str
    name: str
    arguments: str
    """The arguments as JSON text."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls of an assistant turn, after its content."""
    tool_call_id: str = ""
    """The id of the call whose result is the content of a tool turn."""
    name: str = ""
    """In a tool turn, the name of the tool; empty if it is not known."""
    reasoning: str = ""
    """The reasoning of an assistant turn, before its content. The chat template decides whether it is
    rendered."""


class Preamble(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Free text of the output before its constrained part: reasoning, or text before a tool call.

    A preamble ends with the text `end`, which is part of the output. If `start` is given, the prompt is made
    to end with `start`, whether or not the chat template writes it.
    """

    end: str
    start: str = ""
    max_tokens: int | None = None
    """Most tokens of free text, after which `end` is forced. With 0 the output begins with `end`."""
    optional: bool = False
    """Whether the output may stop without `end`, and so without what would follow `end`."""
    apart: bool = False
    """Whether the sampling options hold only for the text after the preamble. If so, `max_tokens` and
    `min_tokens` of the sampling options count from the preamble's end, and stop strings and stop tokens end
    the output only after it. The preamble then has only its own `max_tokens`, unless it is `counted`."""
    counted: bool = False
    """Whether `max_tokens` of the sampling options counts the preamble's tokens although the preamble is
    `apart`, as OpenAI's API counts reasoning."""
    end_ids: tuple[int, ...] = ()
    """The token ids of `end`, filled in by the tokenizer."""

    @property
    def uncounted(self) -> bool:
        """Whether `max_tokens` of the sampling options leaves the preamble's tokens uncounted."""
        return self.apart and not self.counted


Effort = Literal["minimal", "low", "medium", "high"]


class Thinking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The reasoning that a request asks for: on or off, a budget, an effort."""

    enabled: bool = True
    max_tokens: int | None = None
    """The budget: most tokens of reasoning."""
    effort: Effort | None = None
    """The effort of reasoning, for OpenAI's models. Other models have no such setting."""

    def check(self) -> Thinking:
        """Return self; raises `InvalidRequest` for a wrong number of tokens."""
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidRequest(
                f"thinking.max_tokens is {self.max_tokens}; it must be 0 or more.",
                field="thinking.max_tokens",
            )
        return self


class Choices(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Texts to be scored as continuations of a prompt: the log-probabilities of the tokens of each text.

    Nothing is generated.
    """

    texts: tuple[str, ...]
    unconditional: bool = False
    """Whether each text is scored without the prompt as well."""


Pooling = Literal["last", "mean"]
"""The way in which an embedding is made of the tokens' hidden states after the final norm. "last": the hidden
state of the last token. "mean": the mean over all tokens."""


class Continuation(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The output so far of a request whose engine core has died.

    On another engine core, the request continues after this output.
    """

    ids: tuple[int, ...]
    replaced: int = 0
    """The field of the same name in `TextChunk`, as are `forced` and the fields below."""
    forced: tuple[int, ...] = ()


class Generate(Message, frozen=True, kw_only=True):
    """One generation.

    Either `prompt` or `chat` is given. `sampling.n` is 1, as the frontend makes n requests of one.
    """

    rid: str
    prompt: tuple[Segment, ...] = ()
    chat: tuple[ChatMessage, ...] | None = None
    """Turns of a chat, to be rendered with the model's own template, generation prompt included."""
    tools: str = ""
    """The list of tools for the chat template, as JSON text; empty for none."""
    template_kwargs: str = ""
    """Further variables for the chat template: a JSON object, as text."""
    fill: Fill | None = None
    """If set, the model writes what is between the prompt, which is one text, and `fill.suffix`."""
    preambles: tuple[Preamble, ...] = ()
    """Preambles of the output, in order. The constraint holds for the text after the last preamble; without a
    constraint that text is free."""
    thinking: Thinking | None = None
    """The reasoning that is asked for, only for backends that take messages and switch thinking themselves.
    For other backends it is expressed by `preambles`."""
    sampling: SamplingParams = SamplingParams()
    cut_to_fit: bool = False
    """Whether the output is cut to the room that the prompt leaves in the context, and to the engine's
    `max_output_tokens`: in chats, and where `sampling.max_tokens` is a default. Otherwise a larger number is
    refused. `uncounted` preambles and the answer share the room."""
    constraint: Constraint | None = None
    choices: Choices | None = None
    """Choices to score. Nothing is generated then: `sampling.max_tokens` is 0, and there is no constraint. If
    `sampling.token_healing` is off, the prompt's tokens are fixed, and no choice replaces the last of
    them."""
    decide: Decide | None = None
    """Questions to answer about the prompt, by the probabilities of their options. Nothing is generated then:
    `sampling.max_tokens` is 0, and there are no constraint, preambles or choices."""
    pooling: Pooling | None = None
    """If set, an embedding of the prompt is computed with this pooling. Nothing is generated then:
    `sampling.max_tokens` is 0, and there are no constraint, preambles or choices."""
    hint: ProgramHint | None = None
    scope: str = ""
    """Cache scope: pages are shared only between requests of the same scope."""
    lora: str = ""
    """Name of the LoRA adapter; empty for the base model. Requests with different adapters share no pages."""
    lora_revision: str = ""
    """Revision of the adapter, set by the frontend. The request fails if the loaded adapter has another
    revision."""
    every_s: float = 0.0
    """The least time between two chunks, in seconds. If text is not shown while it is generated, fewer chunks
    leave more CPU time for the model."""
    priority: int = 0
    """The priority (`ramify.priority`): higher goes first."""
    flow: str = ""
    """Id of the request's flow. The requests of a flow, such as those made from one HTTP body, share one
    place in the queue. All requests of a program are one flow. Any other request without an id is a flow by
    itself."""
    key: str = ""
    """Name of the API key with which the request came; "" without keys. Set by the server. The requests of a
    key share one place among those of other keys, above the flows."""
    continues: Continuation | None = None
    """Output to continue. The chunks repeat this output, then go on. With `sampling.seed`, the rest is the
    same as without the interruption."""


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Log-probabilities (natural log, of the unmodified distribution) of a run of tokens.

    All lists have one entry per token. `logprobs` holds None for the first token of a prompt.
    """

    ids: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """The most likely (id, logprob) pairs at each token, best first; empty if none were asked for."""
    texts: tuple[str, ...] = ()
    """The text of each token (`ramify.text.token_text`), filled in by the detokenizer."""
    top_texts: tuple[tuple[str, ...], ...] = ()
    offsets: tuple[int, ...] = ()
    """Position in the output's text at which each token begins, in characters; filled in by the detokenizer.
    Empty for a prompt."""


def concatenated(parts: Sequence[TokenLogprobs | None]) -> TokenLogprobs | None:
    """The concatenation of the log-probabilities in `parts`; None if all parts are None."""
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
    """The tokens of the choice. The first may begin with the end of the prompt, which it then replaces (token
    healing)."""
    behind: bool = True
    """Whether the tokens follow all tokens of the prompt. False if they replace the last tokens of the
    prompt."""
    unconditional: TokenLogprobs | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens and times of one request. `prompt_tokens` = `cached_tokens` + computed prompt tokens."""

    prompt_tokens: int = 0
    """Tokens of the prompt. If choices or questions are scored, their tokens that have to be computed are
    added, each once."""
    cached_tokens: int = 0
    """Prompt tokens whose KV pages were found in the prefix tree."""
    distinct_tokens: int = 0
    """Prompt tokens that no earlier request of the same program has computed or is computing. Summed over a
    program, this is the number of distinct tokens in its tree of calls. For a request without a program, all
    prompt tokens."""
    evicted_tokens: int = 0
    """Prompt tokens that had been in the prefix tree, were evicted, and had to be computed again."""
    evicted_by: str = ""
    """Name and id of the program, or id of the request, for which most of `evicted_tokens` were evicted."""
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Completion tokens of the thoughts, with their end mark. 0 if thoughts are not separated from the
    answer."""
    forced_tokens: int = 0
    """Completion tokens that the grammar forced, and that were appended without sampling."""
    draft_tokens: int = 0
    """Draft tokens of speculative decoding that were verified."""
    accepted_tokens: int = 0
    """Draft tokens that were accepted. These completion tokens needed no step of their own."""
    model_draft_tokens: int = 0
    """Draft tokens that a draft model proposed. The other draft tokens come from lookups."""
    model_accepted_tokens: int = 0
    """Accepted draft tokens that a draft model proposed."""
    stored_tokens: int = 0
    """Prompt and completion tokens of an answer from a store (`ramify.answers`). They were not computed, and
    no other field counts them."""
    retractions: int = 0
    grammar_s: float = 0.0
    """Seconds from arrival at the scheduler until the grammar was compiled; 0 if the request did not wait for
    a grammar."""
    queue_s: float = 0.0
    """Seconds in the queue: from arrival, or from the end of `grammar_s`, to the first forward pass."""
    first_token_s: float = 0.0
    """Seconds from arrival at the scheduler to the first output token."""
    total_s: float = 0.0
    """Seconds from arrival at the scheduler to the end."""

    @property
    def prefill_s(self) -> float:
        """Seconds from the first forward pass to the first output token, or to the end of a request that
        generates nothing. 0 if the backend reports no times."""
        return max((self.first_token_s or self.total_s) - self.grammar_s - self.queue_s, 0.0)

    @property
    def decode_s(self) -> float:
        """Seconds from the first output token to the end; 0 if the backend does not report the time of the
        first token."""
        return self.total_s - self.first_token_s if self.first_token_s else 0.0

    @property
    def phases(self) -> dict[str, float] | None:
        """The parts of `total_s` in their order, in seconds; None if the backend reports no times."""
        return {name: getattr(self, name) for name in PHASES} if self.total_s else None


PHASES = ("grammar_s", "queue_s", "prefill_s", "decode_s")
"""The phases of a request: waiting for its grammar, waiting in the queue, computing the prompt, generating
the output."""


class ReachedLimit(msgspec.Struct, frozen=True, kw_only=True):
    """A limit that ended a request."""

    id: str
    """The id of its `LimitHint`."""
    tokens: int
    """Prompt and output tokens that all requests of the limit had used when the request was ended."""
    timed_out: bool
    """True if the time of the limit was over; False if its tokens were used up."""


class Finish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of a generation; `matched` is the stop string or stop token id that ended it."""

    reason: FinishReason
    matched: str | int | None = None
    limit: ReachedLimit | None = None
    """The program's limit that ended the generation; `reason` is "abort" then. None if no limit did."""


class Unenforced(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A schema keyword that the grammar does not enforce, as `Constraint.strict` allows."""

    schema: str
    """JSON pointer of the keyword."""
    message: str
    tool: str = ""
    """Name of the tool whose parameters have the keyword; "" if the keyword is not in a tool's parameters."""


class Enforcement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Differences between a grammar and its constraint."""

    backend: str = "ramify"
    """The library that compiled the grammar: ramify, xgrammar, llguidance or outlines."""
    unenforced: tuple[Unenforced, ...] = ()
    """Keywords of the schema that the grammar does not enforce, so that it allows more than the schema."""
    narrowed: tuple[str, ...] = ()
    """Kinds of valid texts that the grammar does not allow, described by a sentence each."""
    whole: bool = True
    """Whether an output is complete even if it reaches max_tokens. If False, the output may be cut."""

    def fields(self) -> dict[str, Any]:
        """The fields of a response that report the differences.

        They are empty if Ramify's own engine enforces the whole constraint.
        """
        told: dict[str, Any] = {"unenforced": list(self.unenforced)} if self.unenforced else {}
        if self.backend != "ramify":
            told |= {"grammar_backend": self.backend, "narrowed": list(self.narrowed)}
            told["may_be_cut"] = not self.whole
        return told


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """A schema keyword that an output does not satisfy."""

    instance: str
    """JSON pointer to the invalid value in the output."""
    schema: str
    """JSON pointer of the keyword."""
    message: str


class TextChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New text of one request. The last chunk of the request has `finish` set.

    A stop string can end the visible text inside a token: `kept_ids` counts the output ids whose
    text is wholly visible, and `tail` is the visible text after them, so that the visible output is
    exactly ``decode(ids[:kept_ids]) + tail``. Both are set with `finish`. If the first output token replaces
    the end of the prompt (token healing), the whole text is in `tail`.
    """

    rid: str
    text: str = ""
    reasoning: str = ""
    """New text of the model's thoughts, if the backend separates them from the answer. `text` does not
    contain it."""
    ids: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    """Indices in `ids` of the tokens that the grammar forced, if the backend reports them."""
    pieces: tuple[tuple[int, int], ...] = ()
    """The correspondence of `ids` and `text` in a chunk of several steps: consecutive pieces, each as (number
    of ids, number of characters). Empty: all ids and all text are one piece."""
    controls: tuple[int, ...] = ()
    """Positions in `text`, in characters, at which a special token begins. The same characters written by
    ordinary tokens are not listed."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    choices: tuple[ChoiceScore, ...] = ()
    """A score for each choice, in the order of the choices. Set together with `finish` if choices are
    scored."""
    decisions: DecisionScores | None = None
    """The scores of the questions of `Decide`. Set together with `finish`."""
    usage: Usage | None = None
    """The usage. Set on the first chunk, and with `finish`."""
    finish: Finish | None = None
    kept_ids: int = 0
    tail: str = ""
    replaced: int = 0
    """Number of tokens at the end of the prompt that the first id replaces (token healing). On the first
    chunk."""
    enforcement: Enforcement | None = None
    """Differences between the grammar and the constraint, on the first chunk of a constrained output."""
    embedding: bytes = b""
    """The embedding, if one was asked for; set with `finish`. It is a vector of hidden size, float32,
    little-endian, not normalised."""
    violations: tuple[Violation, ...] | None = None
    """Keywords that the output does not satisfy. Set with `finish` if the output is validated after its
    end."""


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and the current state. Pages: free + evictable + leased + in_use == total."""

    running: int
    waiting: int
    compiling: int
    """Requests that wait for their grammar."""
    steps: int
    prompt_tokens: int
    """Tokens of prompts, counted with `cached_tokens` when a request is first admitted."""
    cached_tokens: int
    computed_tokens: int
    """Tokens whose KV was computed: of prompts and of outputs. Tokens that a retraction dropped are counted
    each time they are computed."""
    output_tokens: int
    forced_tokens: int
    draft_tokens: int
    """Draft tokens of speculative decoding that were computed; `computed_tokens` counts them too."""
    accepted_tokens: int
    """Draft tokens that were accepted."""
    model_draft_tokens: int = 0
    """Draft tokens that the draft model proposed. The other draft tokens come from lookups."""
    model_accepted_tokens: int = 0
    """Accepted draft tokens that a draft model proposed."""
    draft_model_tokens: int = 0
    """Tokens that went through the draft model."""
    draft_model_s: float = 0.0
    """Seconds spent in passes of the draft model; part of `step_s`."""
    retractions: int
    evicted_pages: int
    pages_total: int
    pages_free: int
    pages_evictable: int
    pages_leased: int
    pages_in_use: int
    pages_pinned: int = 0
    """Leased pages, and pages in use, that a pin holds."""
    page_size: int
    pages_touched: int = 0
    """Pages that take memory. The others are free: no request has used them yet, or their memory was returned
    to the system."""
    states_total: int = 0
    """Slots for the states of linear attention layers: free + held + in_use == total."""
    states_free: int = 0
    states_held: int = 0
    """States in the prefix tree, from which later requests can continue."""
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
    """KV snapshots that were refused because they were damaged, of another model or engine, or larger than
    the room left."""
    cold_tokens: int = 0
    """Tokens whose KV pages came from the cold tier."""
    cold_bytes: int = 0
    cold_written_bytes: int = 0
    """Bytes of KV pages that were written to the cold tier."""
    cold_damaged_segments: int = 0
    """Segments of the cold tier that were not used because they were damaged."""
    cold_token_s: float = 0.0
    """Measured seconds in which a prompt token is computed; 0 without a cold tier, and before the first
    measurement."""
    cold_byte_s: float = 0.0
    """Measured seconds in which a byte is read from the cold tier; 0 before the first measurement."""
    step_s: float
    """Seconds spent in steps."""
    model_s: float
    """Seconds spent in forward passes, logits and scoring; part of `step_s`."""
