"""Messages that only the engine core's processes exchange, grouped by their receiver.

    frontend ──▶ tokenizer ──▶ scheduler ──▶ detokenizer ──▶ frontend

Data goes round in this direction. Only `Ready`, `Abort`, `Failed`, `Texts` and `TreeChange` may be sent
directly to any process. Every request ends with exactly one final message: a `TextChunk` whose `finish` is
set, or a `Failed`. This module imports only the standard library, msgspec and `ramify.messages`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ramify.cache_contents import CacheContents
from ramify.constraint import Constraint
from ramify.errors import ErrorInfo
from ramify.messages import (
    ChoiceScore,
    Continuation,
    Enforcement,
    Finish,
    Generate,
    Message,
    Pooling,
    Preamble,
    ProgramHint,
    SchedulerStats,
    TextChunk,
    TokenLogprobs,
    Usage,
)
from ramify.model_info import ChatFormat, ModelInfo
from ramify.questions import DecisionScores, OptionEnd
from ramify.sampling_params import SamplingParams

INTERNAL = "~"
"""Prefix of the ids of the runtime's own messages and requests. Ids of clients' requests never begin with
it."""

# --- to the scheduler -------------------------------------------------------------------------------


class ChoiceTokens(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A prompt followed by one of the choices: the first `shared` tokens of the prompt, then `ids`.

    The first `dropped` of `ids` spell only the end of the prompt, and are not scored.
    """

    shared: int
    ids: tuple[int, ...]
    dropped: int = 0


class DecisionForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=True):
    """One written form of a question, tokenised. Its ids follow the state, and the paths follow its ids."""

    ids: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    """Token ids of each spelling of each option. No two are equal."""
    options: tuple[int, ...]
    """The field of the same name in `FormScores`, as is `about`."""
    about: int = -1


class WrittenQuestion(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A question in a layout, tokenised."""

    layout: str
    forms: tuple[DecisionForm, ...]


class DecisionTokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=True):
    """The questions of a tokenised `Decide`. The state is the prompt of the `Submit`."""

    questions: tuple[WrittenQuestion, ...]
    ends: tuple[int, ...] = ()
    """Tokens that end a turn, one of which has to follow each path; set by the scheduler if `end` is "turn".
    Empty for "prefix": a path that begins longer paths of the same form is followed by a token that leaves
    all of these."""
    end: OptionEnd = "prefix"
    """The field of the same name in `Decide`, as is `prompt_ids`."""
    prompt_ids: bool = False


class Submit(Message, frozen=True, kw_only=True):
    """A tokenised `Generate`."""

    rid: str
    ids: tuple[int, ...]
    sampling: SamplingParams
    constraint: Constraint | None = None
    preambles: tuple[Preamble, ...] = ()
    hint: ProgramHint | None = None
    scope: str = ""
    lora: str = ""
    lora_revision: str = ""
    cut_to_fit: bool = False
    """The field of the same name in `Generate`, as is `lora_revision`."""
    open_end: bool = False
    """Whether the prompt ends in plain text, so that the output may begin inside the prompt's last token
    (token healing)."""
    choices: tuple[ChoiceTokens, ...] = ()
    forks: tuple[int, ...] = ()
    """Positions in the prompt, in tokens, at which later prompts are expected to diverge from it."""
    unconditional: bool = False
    decide: DecisionTokens | None = None
    pooling: Pooling | None = None
    every_s: float = 0.0
    priority: int = 0
    flow: str = ""
    key: str = ""
    continues: Continuation | None = None
    """The field of the same name in `Generate`, as are `every_s`, `priority`, `flow` and `key`."""


def flow_key(program: str, flow: str, rid: str) -> tuple[str, str]:
    """(kind, id) of the flow to which a request belongs: that of `program`, else of `flow`, else of the
    request `rid` alone."""
    if program:
        return "program", program
    return ("body", flow) if flow else ("request", rid)


class Abort(Message, frozen=True, kw_only=True):
    """Abort the request `rid`; an unknown id is ignored.

    The answer is a last chunk with the finish reason "abort". With `silent` there is no answer, as the
    detokenizer has found a stop string and has ended the request itself.
    """

    rid: str
    silent: bool = False


class AwaitTools(Message, frozen=True, kw_only=True):
    """A branch of a program waits until all of `tools` have returned.

    The branch's leases are ordered by the time at which the last tool is expected to return.
    """

    program: str
    branch: str
    tools: tuple[str, ...]


class EndProgram(Message, frozen=True, kw_only=True):
    """The program has ended. The scheduler releases its leases."""

    program: str


class FlushCache(Message, frozen=True, kw_only=True):
    """Drop every page that no running request uses. Answered by `Reply`."""

    rid: str


class GetStats(Message, frozen=True, kw_only=True):
    """Ask the scheduler for its counters. Answered by `Reply` with `stats`."""

    rid: str


class LoadLora(Message, frozen=True, kw_only=True):
    """Load the LoRA adapter in the folder `path` as `name`.

    Answered by `Reply` with `lora`, or by `Failed`.
    """

    rid: str
    name: str
    path: str


class UnloadLora(Message, frozen=True, kw_only=True):
    """Unload a LoRA adapter.

    Requests that already use the adapter run to their end with it. Answered by `Reply` or `Failed`.
    """

    rid: str
    name: str


class Tokenize(Message, frozen=True, kw_only=True):
    """Ask the tokenizer for the token ids of prompts. Answered by `Texts` or `Failed`.

    `special`: whether special tokens are added, such as the begin-of-sequence token. `entries`: whether the
    ids' entries in the vocabulary are asked for, too.
    """

    rid: str
    prompts: tuple[Generate, ...]
    special: bool
    entries: bool = True


class Detokenize(Message, frozen=True, kw_only=True):
    """Ask the tokenizer for the text of ids. Answered by `Texts` or `Failed`."""

    rid: str
    ids: tuple[tuple[int, ...], ...]
    skip_special_tokens: bool


class GetSnapshot(Message, frozen=True, kw_only=True):
    """Ask the scheduler for its queue and its prefix tree.

    Answered by `Reply` with `stats` and `snapshot`.
    """

    rid: str
    nodes: int
    """Most nodes of the tree in the answer."""
    programs: int
    """Most programs of the queue in the answer."""


class GetCache(Message, frozen=True, kw_only=True):
    """Ask the scheduler what its prefix cache holds. Answered by `Reply` with `cache`."""

    rid: str
    most: int
    """Most holds, and most prefixes that nobody holds, in the answer."""
    ids: bool = False
    """Whether the answer has the last tokens of each prefix."""
    owners: str = ""
    """Beginning of the owners whose holds are told. If it is not empty, no other prefixes are told."""


class ReleaseHold(Message, frozen=True, kw_only=True):
    """End the leases of `owner`, pins and others. Answered by `Reply` with `released`."""

    rid: str
    owner: str


class GetTree(Message, frozen=True, kw_only=True):
    """Ask the scheduler for the whole content of its prefix tree. Answered by a `TreeChange` with `whole`."""


class GetPrefixes(Message, frozen=True, kw_only=True):
    """Ask the scheduler for the prefixes in its tree. Answered by `Reply` with `prefixes`."""

    rid: str
    most: int
    """Most tokens of all prefixes in the answer together."""


class ExportPrefix(Message, frozen=True, kw_only=True):
    """Write the KV pages of a prefix to a new file `path`, as a KV snapshot (`ramify.runtime.kv_transfer`).

    Answered by `Reply` with `transferred`, or by `Failed`; after a failure there is no file. Only whole pages
    are written, up to the end of the part of the prefix that is in the tree.
    """

    rid: str
    ids: tuple[int, ...]
    scope: str
    """The prefix tree's scope (`ramify.runtime.lora_names.tree_scope`)."""
    path: str
    """The path of the KV snapshot's file. On a Ray cluster, here and in `ImportPrefix`: the snapshot's name
    (`ramify.ray.snapshots`)."""
    skip: int = 0
    """Number of tokens at the beginning whose pages the receiver has already. These pages are left out."""


class ImportPrefix(Message, frozen=True, kw_only=True):
    """Add the pages of the KV snapshot in the file `path` to the prefix tree, as if they had been computed.

    Answered by `Reply` with `transferred`. Answered by `Failed`, with the tree unchanged, if the KV snapshot
    does not fit this engine, is damaged, or there is no room for it. The file is not removed.
    """

    rid: str
    path: str


class GrammarReady(Message, frozen=True, kw_only=True):
    """Answer of a grammar compiler to the job with this key: the serialised grammar."""

    key: str
    engine: str
    payload: bytes
    enforcement: Enforcement = Enforcement()

    @property
    def constraint_key(self) -> str:
        """The key of the constraint, under which the grammar is kept."""
        return self.key.partition(" ")[0]


class GrammarFailed(Message, frozen=True, kw_only=True):
    """Answer of a grammar compiler: the constraint of the job with this key cannot be compiled."""

    key: str
    error: ErrorInfo


class CompilerDied(Message, frozen=True, kw_only=True):
    """The grammar compiler process with the number `generation` has ended.

    Processes are numbered in the order of their start.
    """

    generation: int


class Woken(Message, frozen=True, kw_only=True):
    """A thread of the scheduler's own process has something for it. `leave`: the process is about to end."""

    leave: bool = False


class CompileGrammar(Message, frozen=True, kw_only=True):
    """Order to a grammar compiler to compile a constraint, and to refuse it if a stop string or stop token of
    the request may cut an answer. `key` is the constraint's; a blank and the stops follow, if there are any.
    """

    key: str
    constraint: Constraint
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


class DropGrammar(Message, frozen=True, kw_only=True):
    """Message to a grammar compiler that no request waits for this key any more.

    The message is not answered. An answer for the key may have been sent before.
    """

    key: str


# --- to the detokenizer -----------------------------------------------------------------------------


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The output of one step, or of several steps together, for one request."""

    rid: str
    ids: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    """Indices in `ids` of the tokens that the grammar forced."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    choices: tuple[ChoiceScore, ...] = ()
    """A score for each choice, in the order of the choices. Set together with `finish` if choices are
    scored."""
    decisions: DecisionScores | None = None
    embedding: bytes = b""
    """The field of the same name in `TextChunk`, as is `decisions`."""
    first: bool = False
    """Whether this is the request's first chunk, in which `sampling` and `context` are set."""
    sampling: SamplingParams | None = None
    """The sampling options. The detokenizer needs the stop strings and `skip_special_tokens`."""
    stop_after: tuple[str, ...] = ()
    """Texts that the output contains in this order. Stop strings count only after the last of these texts. On
    the first chunk."""
    context: tuple[int, ...] = ()
    """The last ids of the prompt, needed as some tokenizers decode a token differently at the start of a
    text. On the first chunk."""
    overlap: str = ""
    """The end of the prompt's text, with which the output's first token begins (token healing). On the first
    chunk."""
    replaced: int = 0
    """Number of tokens at the end of the prompt that spelled `overlap`. On the first chunk."""
    enforcement: Enforcement | None = None
    """Differences between the compiled grammar and the constraint, on the first chunk of a constrained
    output."""
    usage: Usage | None = None
    """The usage. Only on the first and on the last chunk."""
    every_s: float = 0.0
    """Least seconds between two chunks (`Generate.every_s`), on the first chunk. For a request with stop
    strings, the detokenizer holds text back; for any other, the scheduler does."""
    finish: Finish | None = None


class StepOutput(Message, frozen=True, kw_only=True):
    """The output of one scheduler step for all requests."""

    chunks: tuple[TokenChunk, ...]


# --- to the frontend --------------------------------------------------------------------------------


class StepText(Message, frozen=True, kw_only=True):
    """The text of one scheduler step for all requests."""

    chunks: tuple[TextChunk, ...]


class Failed(Message, frozen=True, kw_only=True):
    """The request ended in an error."""

    rid: str
    error: ErrorInfo


class TreeNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=True):
    """A node of the prefix tree. It has the tokens ``[start, start + tokens)`` of a sequence."""

    parent: int
    """Index of the parent in `Snapshot.nodes`; -1 for the root of a cache scope."""
    start: int
    tokens: int
    pages: int
    """Number of pages that the node owns."""
    state: Literal["in_use", "leased", "evictable"]
    locks: int = 0
    """Number of running requests that need the node."""
    owners: tuple[str, ...] = ()
    """Programs with leases whose last token is in this node; at most four are named."""
    hidden: int = 0
    """Number of children that are not in `Snapshot.nodes`."""
    has_state: bool = False
    """Whether the node holds the state of linear attention layers after its last token."""


class QueueShare(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one program in the scheduler. Each request is counted in exactly one field."""

    program: str
    """The program's id; empty for requests that belong to no program."""
    running: int
    waiting: int
    retracted: int
    """Number of requests that were retracted and wait again."""
    compiling: int
    """Number of requests that wait for their grammars."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's queue and prefix tree, to be shown to people, within the bounds of `GetSnapshot`."""

    nodes: tuple[TreeNode, ...]
    """Nodes, each after its parent. Nodes in use come first, then the most recently used."""
    queue: tuple[QueueShare, ...]
    """The programs in the queue; those with most requests come first."""
    queue_hidden: int
    """Number of programs that are left out of `queue`."""


class Transferred(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The result of an export or an import."""

    tokens: int
    """Number of tokens, from the first of the prefix on, that are in the KV snapshot (export) or now in the
    prefix tree (import)."""
    bytes: int
    """Size of the copied KV pages, in bytes."""


class HeldPrefix(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A prefix in the tree.

    In a list, prefixes that programs lease come first, then the most recently used.
    """

    scope: str
    """The prefix tree's scope, as in `ExportPrefix`."""
    ids: tuple[int, ...]
    owners: tuple[str, ...] = ()
    """Programs that lease the prefix."""


class Reply(Message, frozen=True, kw_only=True):
    """Answer to a control message."""

    rid: str
    stats: SchedulerStats | None = None
    snapshot: Snapshot | None = None
    lora: str = ""
    """Revision of the LoRA adapter that was loaded."""
    transferred: Transferred | None = None
    prefixes: tuple[HeldPrefix, ...] = ()
    cache: CacheContents | None = None
    released: int = 0
    """Number of leases that were ended."""


class TokenIds(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The ids of a prompt, and their entries in the vocabulary."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]


class Texts(Message, frozen=True, kw_only=True):
    """The answer to `Tokenize` is in `prompts`. The answer to `Detokenize` is in `whole` (special tokens
    included) and in `text` (as `skip_special_tokens` says)."""

    rid: str
    prompts: tuple[TokenIds, ...] = ()
    whole: tuple[str, ...] = ()
    text: tuple[str, ...] = ()


class PageRun(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Consecutive pages of one sequence in the prefix tree."""

    scope: str
    """The prefix tree's scope, which also contains the revision of the LoRA adapter
    (`ramify.runtime.lora_names.tree_scope`)."""
    before: int | None
    """Digest of the page before the first page of the run; None if the run begins at the start of the
    sequence."""
    digests: tuple[int, ...]
    tokens: bytes
    """The token ids of the run's pages, one page for each digest, as int32 in native byte order."""


class TreeChange(Message, frozen=True, kw_only=True):
    """Changes of the prefix tree in one step, as digests of page ends.

    Sent if there are replicas, or KV events are published.
    """

    epoch: int
    """Id of the tree. The tree of a restarted engine core has a new epoch."""
    number: int
    """Number of the message, counted for each tree from 1 on."""
    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    whole: bool = False
    """Whether `added` is the whole content of the tree instead of a change."""
    runs: tuple[PageRun, ...] = ()
    """The runs of the added pages, if KV events are published."""


class Ready(Message, frozen=True, kw_only=True):
    """A process of the engine core has started.

    The tokenizer and the scheduler each set the fields that they know.
    """

    role: str
    pid: int
    error: ErrorInfo | None = None
    """The reason why the process could not start; None if it has started."""
    chat_format: ChatFormat | None = None
    special_tokens: dict[str, str] = msgspec.field(default_factory=dict)
    """See `ModelInfo`."""
    model_info: ModelInfo | None = None
    max_prompt_tokens: int = 0
    page_bytes: int = 0
    """Size of a KV page over all layers, in bytes; 0 if pages are not transferred."""


# --- all, by their receiver -------------------------------------------------------------------------

Forwarded = (
    Abort
    | AwaitTools
    | EndProgram
    | FlushCache
    | LoadLora
    | UnloadLora
    | GetStats
    | GetSnapshot
    | GetCache
    | ReleaseHold
    | GetTree
    | GetPrefixes
    | ExportPrefix
    | ImportPrefix
)
"""Messages that the tokenizer passes on to the scheduler unchanged. They take this way to stay in order with
the requests."""
ToTokenizer = Generate | Tokenize | Detokenize | Forwarded
ToScheduler = Submit | Forwarded | GrammarReady | GrammarFailed | CompilerDied | Woken
ToDetokenizer = StepOutput | Reply | Failed
ToFrontend = StepText | Reply | Texts | Failed | Ready | TreeChange
