"""The messages that travel round the ring of processes, grouped by their receiver.

    frontend ──▶ tokenizer ──▶ scheduler ──▶ detokenizer ──▶ frontend

Data goes one way round; only `Abort` and `Failed` may enter out of turn. Every request ends in
exactly one final message: a `TextChunk` whose `finish` is set, or a `Failed`. All are frozen msgspec
structs; this module needs the standard library and msgspec alone.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ramify.constraint import Constraint
from ramify.errors import ErrorInfo
from ramify.sampling_params import SamplingParams

Segment = str | tuple[int, ...]
"""A piece of a prompt: text still to be tokenised, or token ids to be taken as they are."""

FinishReason = Literal["stop", "length", "abort"]

HELD_S = 0.5
"""How long a text may be held back that nobody follows as it comes, in seconds."""

NextUse = Literal["soon", "join", "tool", "unknown", "never"]
"""When a program comes back for what a request leaves in the cache, soonest first: as its next step, after
sibling branches have finished, after a tool has returned, nobody knows, or not at all."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of all messages; the tag is the class name."""


class ProgramHint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the runtime may know of the program that a request belongs to."""

    program: str
    """Identifies the program run; its leases end with `EndProgram`."""
    name: str = ""
    """What people call the program."""
    lease_s: float = 0.0
    """Keep this request's pages leased for so many seconds after it ends; 0 takes no lease."""
    path: tuple[str, ...] = ()
    """Names of the forks and steps from the program down to this request, for people to read."""
    next_use: NextUse = "unknown"
    """When these pages are needed again; the lease's place in the order of eviction. "never" takes none."""
    branch: str = ""
    """The branch of the program that asks. Each branch has leases of its own."""
    forks: tuple[str, ...] = ()
    """The forks that the branch comes from, outermost first. What the prompts of all branches of a fork have
    in common is kept for the join."""
    ended: tuple[str, ...] = ()
    """Branches and forks that nobody will extend any more: their leases end."""
    calls_left: int | None = None
    """Calls of the program that are known to follow this one; None where nobody knows."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool that the model has made."""

    id: str
    name: str
    arguments: str
    """JSON text."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """What an assistant turn called, after its content."""
    tool_call_id: str = ""
    """Which call the content of a tool turn is the result of."""
    name: str = ""
    """The tool whose result this is, where it is known."""
    reasoning: str = ""
    """What an assistant turn thought before its content; templates show it or leave it out."""


class Preamble(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Free text that comes before what the constraint is about: reasoning, or prose before a tool call.

    It ends with the text `end`, which belongs to the output. With `start` the prompt is made to end in
    that text, whether or not the chat template writes it.
    """

    end: str
    start: str = ""
    max_tokens: int | None = None
    """After so many tokens of free text `end` is forced; with 0 the output begins with it."""
    optional: bool = False
    """The output may stop without `end`, and so without what comes after it."""
    end_ids: tuple[int, ...] = ()
    """The tokens of `end`, filled in by the tokenizer."""


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Log-probabilities (natural log, of the unmodified distribution) of a run of tokens.

    All lists have one entry per token. `logprobs` holds None for the first token of a prompt.
    """

    ids: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Per token the most likely (id, logprob) pairs, best first; empty when none were asked for."""
    texts: tuple[str, ...] = ()
    """Per token its text, filled in by the detokenizer."""
    top_texts: tuple[tuple[str, ...], ...] = ()


class Choices(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Texts to be scored behind a prompt: how likely each is there, token by token. Nothing is generated."""

    texts: tuple[str, ...]
    unconditional: bool = False
    """Score the tokens of each without the prompt as well."""


class ChoiceScore(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one of the `Choices` came to."""

    tokens: TokenLogprobs
    """Of its tokens; the first may begin with the end of the prompt."""
    behind: bool = True
    """These are the tokens behind those of the prompt, none of which was changed."""
    unconditional: TokenLogprobs | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request cost. prompt = cached + computed prompt tokens."""

    prompt_tokens: int = 0
    """Where choices are scored, the tokens of the choices that others follow on count as well, each once."""
    cached_tokens: int = 0
    """Prompt tokens whose KV pages were found in the tree."""
    distinct_tokens: int = 0
    """Prompt tokens that no earlier request of the same program had computed or was computing. Over a program
    they sum to the distinct tokens of its tree of calls; without a program they are all prompt tokens."""
    evicted_tokens: int = 0
    """Prompt tokens that were in the tree once and had to be computed again because they had been evicted."""
    evicted_by: str = ""
    """Whose need took most of these: a program's name and id, or a request's id."""
    completion_tokens: int = 0
    forced_tokens: int = 0
    """Completion tokens that the grammar left no choice about, appended without sampling."""
    retractions: int = 0
    queue_s: float = 0.0
    """Arrival at the scheduler to the first forward pass."""
    first_token_s: float = 0.0
    """Arrival at the scheduler to the first output token."""
    total_s: float = 0.0
    """Arrival at the scheduler to the end."""

    @property
    def writing_s(self) -> float:
        """Since the first output token; 0 where nobody has said when that came."""
        return self.total_s - self.first_token_s if self.first_token_s else 0.0


class Finish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a generation ended; `matched` is the stop string or stop token id that ended it."""

    reason: FinishReason
    matched: str | int | None = None


# --- to the tokenizer ---------------------------------------------------------------------------


class Generate(Message, frozen=True, kw_only=True):
    """One generation. Either `prompt` or `chat` is given; `sampling.n` is 1 here (the frontend fans out)."""

    rid: str
    prompt: tuple[Segment, ...] = ()
    chat: tuple[ChatMessage, ...] | None = None
    """Rendered with the model's own template, followed by its generation prompt."""
    tools: str = ""
    """JSON text of the list of tools that the chat template is given; empty for none."""
    template_kwargs: str = ""
    """JSON text of the object of further variables that the chat template is given."""
    preambles: tuple[Preamble, ...] = ()
    """In their order in the output; after the last one comes the constraint, or text of any kind."""
    sampling: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    choices: Choices | None = None
    """Scored instead of a generation: `sampling.max_tokens` is 0 then, and there is no constraint. Where
    `sampling.token_healing` is off the prompt ends on a token, and no choice reaches into it."""
    hint: ProgramHint | None = None
    scope: str = ""
    """Cache scope: pages put in under one scope are invisible to every other."""
    every_s: float = 0.0
    """The least time between two chunks, in seconds. Where nobody shows the text as it comes, making, sending
    and reading chunks would take processors from the model for nothing."""


# --- to the scheduler ---------------------------------------------------------------------------


class ChoiceTokens(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A choice behind a prompt: the first `shared` tokens of the prompt, then `ids`.

    Of these the first `dropped` spell the end of the prompt only, and are not scored.
    """

    shared: int
    ids: tuple[int, ...]
    dropped: int = 0


class Submit(Message, frozen=True, kw_only=True):
    """A tokenised `Generate`."""

    rid: str
    ids: tuple[int, ...]
    sampling: SamplingParams
    constraint: Constraint | None = None
    preambles: tuple[Preamble, ...] = ()
    hint: ProgramHint | None = None
    scope: str = ""
    open_end: bool = False
    """The prompt ends in text that may have been meant to go on inside its last token."""
    choices: tuple[ChoiceTokens, ...] = ()
    unconditional: bool = False
    every_s: float = 0.0
    """See `Generate`."""


class Abort(Message, frozen=True, kw_only=True):
    """Stop working on `rid`; unknown ids are ignored.

    From the frontend it is answered by a last chunk with finish reason "abort". With `silent` (the
    detokenizer has found a stop string and has ended the request itself) nothing is answered.
    """

    rid: str
    silent: bool = False


class AwaitTools(Message, frozen=True, kw_only=True):
    """A branch of a program goes on when these tools have returned: its pages are kept accordingly."""

    program: str
    branch: str
    tools: tuple[str, ...]


class EndProgram(Message, frozen=True, kw_only=True):
    """The program has ended: its leases are released."""

    program: str


class FlushCache(Message, frozen=True, kw_only=True):
    """Drop every page that no running request uses; answered by `Reply`."""

    rid: str


class GetStats(Message, frozen=True, kw_only=True):
    """Ask the scheduler for its counters; answered by `Reply` with a `SchedulerStats`."""

    rid: str


class GetSnapshot(Message, frozen=True, kw_only=True):
    """Ask the scheduler what it holds now; answered by `Reply` with `stats` and `snapshot`."""

    rid: str
    nodes: int
    """At most so many of the tree."""
    programs: int
    """At most so many in the queue."""


class GrammarReady(Message, frozen=True, kw_only=True):
    """From a grammar compiler: the serialised grammar of the constraint with this key."""

    key: str
    engine: str
    payload: bytes


class GrammarFailed(Message, frozen=True, kw_only=True):
    """From a grammar compiler: the constraint with this key cannot be compiled."""

    key: str
    error: ErrorInfo


class CompilerDied(Message, frozen=True, kw_only=True):
    """The grammar compiler process that was started as number `generation` has ended."""

    generation: int


class CompileGrammar(Message, frozen=True, kw_only=True):
    """To a grammar compiler."""

    key: str
    constraint: Constraint


# --- to the detokenizer -------------------------------------------------------------------------


class Unenforced(msgspec.Struct, frozen=True, kw_only=True):
    """A schema keyword that the grammar leaves out, as was asked for (`Constraint.strict`)."""

    schema: str
    """JSON pointer of the keyword."""
    message: str


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step, or several that are told together, produced for one request."""

    rid: str
    ids: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    """Places in `ids` of the tokens that the grammar left no choice about."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    choices: tuple[ChoiceScore, ...] = ()
    """With `finish`, where choices are scored: one for each, in their order."""
    first: bool = False
    """The request's first chunk: `sampling` and `context` are set."""
    sampling: SamplingParams | None = None
    """For its stop strings and the treatment of special tokens."""
    context: tuple[int, ...] = ()
    """The prompt's last ids: some tokenizers spell a token differently at the start of a text."""
    overlap: str = ""
    """On the first chunk: the end of the prompt that the output's first token begins with."""
    unenforced: tuple[Unenforced, ...] = ()
    """On the first chunk: what the constraint says and the grammar does not enforce."""
    usage: Usage | None = None
    """Set on the first and the last chunk."""
    every_s: float = 0.0
    """On the first chunk: see `Generate`. Where the request has stop strings the detokenizer holds text back;
    else chunks come no oftener."""
    finish: Finish | None = None


class StepOutput(Message, frozen=True, kw_only=True):
    """Everything one scheduler step produced, in one message."""

    chunks: tuple[TokenChunk, ...]


# --- to the frontend ----------------------------------------------------------------------------


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
    ids: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    """Places in `ids` of the tokens that the grammar left no choice about, where the backend tells."""
    pieces: tuple[tuple[int, int], ...] = ()
    """Where several ids are told together: how `ids` and `text` go together, as numbers of ids and of
    characters of one piece after the other. All of both are one piece where there are none."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    choices: tuple[ChoiceScore, ...] = ()
    """With `finish`, where choices are scored: one for each, in their order."""
    usage: Usage | None = None
    """With `finish`, and on the first chunk of a request whose chunks are held back."""
    finish: Finish | None = None
    kept_ids: int = 0
    tail: str = ""
    unenforced: tuple[Unenforced, ...] = ()
    """On the first chunk: what the constraint says and the grammar does not enforce."""
    violations: tuple[Violation, ...] | None = None
    """With `finish`, where the constraint is validated afterwards: what the output does not satisfy."""


class StepText(Message, frozen=True, kw_only=True):
    """The text of one scheduler step."""

    chunks: tuple[TextChunk, ...]


class Failed(Message, frozen=True, kw_only=True):
    """The request ended in an error."""

    rid: str
    error: ErrorInfo


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since start, and the state of now. Pages: free + evictable + leased + in_use == total."""

    running: int
    waiting: int
    compiling: int
    """Requests that wait for their grammar."""
    steps: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    forced_tokens: int
    guessed_tokens: int
    """Tokens computed on the chance that they come next; `computed_tokens` counts them too."""
    accepted_tokens: int
    """Of these, the ones that did."""
    retractions: int
    evicted_pages: int
    pages_total: int
    pages_free: int
    pages_evictable: int
    pages_leased: int
    pages_in_use: int
    page_size: int
    step_s: float
    """Seconds spent in steps."""
    model_s: float
    """Of these, seconds in the forward pass."""


class TreeNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=True):
    """A node of the prefix tree: tokens ``[start, start + tokens)`` of a sequence."""

    parent: int
    """Its place in the list; -1 for the root of a cache scope."""
    start: int
    tokens: int
    pages: int
    """Those that this node accounts for."""
    state: Literal["in_use", "leased", "evictable"]
    locks: int = 0
    """Running requests that need it."""
    owners: tuple[str, ...] = ()
    """Some of the programs whose leases end here."""
    hidden: int = 0
    """Children that are not in the list."""


class QueueShare(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one program in the scheduler, each counted once."""

    program: str
    """Empty for the requests of no program."""
    running: int
    waiting: int
    retracted: int
    """Back in the queue after they had run."""
    compiling: int
    """Waiting for their grammar."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler holds, as far as a person looks: bounded by what `GetSnapshot` asked for."""

    nodes: tuple[TreeNode, ...]
    """Parents before their children; in use first, then the most recently used."""
    queue: tuple[QueueShare, ...]
    """The programs with most requests first."""
    queue_hidden: int
    """Programs that are not in the list."""


class Reply(Message, frozen=True, kw_only=True):
    """Answer to a control message."""

    rid: str
    stats: SchedulerStats | None = None
    flushed: bool | None = None
    snapshot: Snapshot | None = None


class ToolPieces(msgspec.Struct, frozen=True, kw_only=True):
    """How the chat template writes tools and results in a conversation that begins with a system turn."""

    start: str
    """What precedes the system content when there are tools."""
    place: Literal["system", "user"]
    """The tools end the system content, or begin that of the user turn after it."""
    before: str
    between: str
    after: str
    """What stands around the tools, each as JSON."""
    indent: int | None
    """Of that JSON, in spaces; None: all in one line."""
    quoted: bool
    """A result is shown as a JSON string, whose quotes belong to the pieces of the tool turn."""


class ChatFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The model's chat template as pieces that can be appended one turn at a time.

    A conversation is ``prefix[">system"] + content + suffix["system"] + prefix["system>user"] + …``:
    `prefix` is keyed by "previous role>role" (empty previous role at the start, where a template may
    insert a default system turn), `suffix` by role.
    """

    prefix: dict[str, str]
    suffix: dict[str, str]
    exact: bool
    """Composition equalled the Jinja template on every probe conversation."""
    tool_format: str = "generic"
    """Name of the format that the template writes tool calls in (`ramify.tool_calls.formats`)."""
    tools: ToolPieces | None = None
    """How tools are told of; None where that cannot be appended as the template writes it."""
    difference: str = ""
    """Where `exact` is False: the first probe conversation that differs, in both forms."""
    variables: tuple[str, ...] = ()
    """What the template reads beside messages, tools, special tokens and add_generation_prompt."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client may know of the served model."""

    name: str
    path: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    device: str
    chat_format: ChatFormat | None
    """None when the model has no chat template."""


class Ready(Message, frozen=True, kw_only=True):
    """A process of the ring is up. The tokenizer and the scheduler each fill in what they know."""

    role: str
    pid: int
    error: ErrorInfo | None = None
    """Set when it could not start."""
    chat_format: ChatFormat | None = None
    model_info: ModelInfo | None = None
    pages_total: int = 0
    max_prompt_tokens: int = 0
    load_s: float = 0.0


ToTokenizer = Generate | Abort | AwaitTools | EndProgram | FlushCache | GetStats | GetSnapshot
"""All but `Generate` are passed on as they are, so that they stay in order with the requests."""
ToScheduler = (
    Submit
    | Abort
    | AwaitTools
    | EndProgram
    | FlushCache
    | GetStats
    | GetSnapshot
    | GrammarReady
    | GrammarFailed
    | CompilerDied
)
ToDetokenizer = StepOutput | Reply | Failed
ToFrontend = StepText | Reply | Failed | Ready
