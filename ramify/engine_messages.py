"""Messages that only the engine core's processes exchange, grouped by their receiver.

    frontend ──▶ tokenizer ──▶ scheduler ──▶ detokenizer ──▶ frontend

Data goes one way round; only `Ready`, `Abort`, `Failed`, `Texts` and `TreeChange` may be sent to any process
directly. Every request ends in exactly one final message: a `TextChunk` whose `finish` is set, or a
`Failed`. This module needs the standard library, msgspec and `ramify.messages` alone.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ramify.constraint import Constraint
from ramify.errors import ErrorInfo
from ramify.messages import (
    ChatFormat,
    ChoiceScore,
    Continuation,
    Enforcement,
    Finish,
    Generate,
    Message,
    ModelInfo,
    Pooling,
    Preamble,
    ProgramHint,
    SchedulerStats,
    TextChunk,
    TokenLogprobs,
    Usage,
)
from ramify.sampling_params import SamplingParams

INTERNAL = "~"
"""Prefix of the ids of the runtime's own control calls and requests; no client's request has such an id."""

# --- to the scheduler -------------------------------------------------------------------------------


class ChoiceTokens(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A choice behind a prompt: the first `shared` tokens of the prompt, then `ids`.

    The first `dropped` of `ids` spell only the end of the prompt, and are not scored.
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
    lora: str = ""
    lora_revision: str = ""
    """The field of the same name in `Generate`."""
    open_end: bool = False
    """The prompt ends in plain text: the output may begin inside its last token (token healing)."""
    choices: tuple[ChoiceTokens, ...] = ()
    forks: tuple[int, ...] = ()
    """Numbers of tokens after which later prompts are expected to part from this one."""
    unconditional: bool = False
    pooling: Pooling | None = None
    every_s: float = 0.0
    priority: int = 0
    flow: str = ""
    continues: Continuation | None = None
    """The field of the same name in `Generate`; so are `every_s`, `priority` and `flow`."""


def flow_key(program: str, flow: str, rid: str) -> tuple[str, str]:
    """Kind and id of the flow of a request: its program's, else its body's, else its own."""
    if program:
        return "program", program
    return ("body", flow) if flow else ("request", rid)


class Abort(Message, frozen=True, kw_only=True):
    """Stop working on `rid`; unknown ids are ignored.

    It is answered by a last chunk with finish reason "abort". With `silent` there is no answer: the
    detokenizer has found a stop string and has ended the request itself.
    """

    rid: str
    silent: bool = False


class AwaitTools(Message, frozen=True, kw_only=True):
    """A branch of a program goes on when all of these tools have returned; its leases are ordered by that."""

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


class LoadLora(Message, frozen=True, kw_only=True):
    """Load the LoRA adapter in the folder `path` as `name`; answered by `Reply` with `lora`, or `Failed`."""

    rid: str
    name: str
    path: str


class UnloadLora(Message, frozen=True, kw_only=True):
    """Forget a LoRA adapter; requests that have it go on. Answered by `Reply` or `Failed`."""

    rid: str
    name: str


class Tokenize(Message, frozen=True, kw_only=True):
    """Ask the tokenizer for the ids of prompts; answered by `Texts` or `Failed`.

    `special`: special tokens are added, such as that of the beginning. `entries`: the ids' entries in the
    vocabulary are wanted too.
    """

    rid: str
    prompts: tuple[Generate, ...]
    special: bool
    entries: bool = True


class Detokenize(Message, frozen=True, kw_only=True):
    """Ask the tokenizer for the text of ids; answered by `Texts` or `Failed`."""

    rid: str
    ids: tuple[tuple[int, ...], ...]
    skip_special_tokens: bool


class GetSnapshot(Message, frozen=True, kw_only=True):
    """Ask the scheduler for its queue and its tree; answered by `Reply` with `stats` and `snapshot`."""

    rid: str
    nodes: int
    """The most nodes of the tree."""
    programs: int
    """The most programs of the queue."""


class GetTree(Message, frozen=True, kw_only=True):
    """Ask the scheduler for all that its tree holds; answered by a `TreeChange` that is `whole`."""


class GetPrefixes(Message, frozen=True, kw_only=True):
    """Ask the scheduler which prefixes its tree holds; answered by `Reply` with `prefixes`."""

    rid: str
    most: int
    """Most tokens of all prefixes together."""


class ExportPrefix(Message, frozen=True, kw_only=True):
    """Write the KV pages of a prefix to a new file `path`, as a KV snapshot (`ramify.runtime.kv_transfer`).

    Answered by `Reply` with `transferred`, or by `Failed`, with no file left. Only whole pages are written,
    as many as the prefix tree holds.
    """

    rid: str
    ids: tuple[int, ...]
    scope: str
    """The tree's: `ramify.runtime.lora_names.tree_scope`."""
    path: str
    """The file of the KV snapshot; for an actor on a Ray cluster, and in `ImportPrefix`, its name
    (`ramify.ray.snapshots`)."""
    skip: int = 0
    """Tokens at the beginning whose pages the reader has: they are left out."""


class ImportPrefix(Message, frozen=True, kw_only=True):
    """Take the pages of the KV snapshot in the file `path` into the prefix tree, as if they had been
    computed.

    Answered by `Reply` with `transferred`, or by `Failed` where the KV snapshot does not fit this engine, is
    damaged, or finds no room; nothing has changed then. The file stays.
    """

    rid: str
    path: str


class GrammarReady(Message, frozen=True, kw_only=True):
    """Answer of a grammar compiler: the serialised grammar of the constraint with this key."""

    key: str
    engine: str
    payload: bytes
    enforcement: Enforcement = Enforcement()


class GrammarFailed(Message, frozen=True, kw_only=True):
    """Answer of a grammar compiler: the constraint with this key cannot be compiled."""

    key: str
    error: ErrorInfo


class CompilerDied(Message, frozen=True, kw_only=True):
    """The grammar compiler process that was started as number `generation` has ended."""

    generation: int


class CompileGrammar(Message, frozen=True, kw_only=True):
    """Order to a grammar compiler: compile the constraint."""

    key: str
    constraint: Constraint


class DropGrammar(Message, frozen=True, kw_only=True):
    """Message to a grammar compiler: nobody waits for this key any more. There is no answer, unless one was
    sent before."""

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
    """A score for each choice, in their order; set with `finish` where choices are scored."""
    embedding: bytes = b""
    """The field of the same name in `TextChunk`."""
    first: bool = False
    """The request's first chunk: `sampling` and `context` are set."""
    sampling: SamplingParams | None = None
    """The sampling options, whose stop strings and treatment of special tokens the detokenizer needs."""
    stop_after: tuple[str, ...] = ()
    """Texts, one after the other, before which stop strings do not count; on the first chunk."""
    context: tuple[int, ...] = ()
    """The prompt's last ids: some tokenizers spell a token differently at the start of a text."""
    overlap: str = ""
    """The end of the prompt that the output's first token begins with; on the first chunk."""
    replaced: int = 0
    """Number of the prompt's tokens that spelled `overlap`; on the first chunk."""
    enforcement: Enforcement | None = None
    """Differences between the grammar and the constraint, on the first chunk of a constrained output."""
    usage: Usage | None = None
    """The usage, on the first and the last chunk."""
    every_s: float = 0.0
    """Least seconds between chunks (`Generate.every_s`), on the first chunk. With stop strings the
    detokenizer holds text back; else the scheduler does."""
    finish: Finish | None = None


class StepOutput(Message, frozen=True, kw_only=True):
    """Everything one scheduler step produced, in one message."""

    chunks: tuple[TokenChunk, ...]


# --- to the frontend --------------------------------------------------------------------------------


class StepText(Message, frozen=True, kw_only=True):
    """The text of one scheduler step."""

    chunks: tuple[TextChunk, ...]


class Failed(Message, frozen=True, kw_only=True):
    """The request ended in an error."""

    rid: str
    error: ErrorInfo


class TreeNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=True):
    """A node of the prefix tree: tokens ``[start, start + tokens)`` of a sequence."""

    parent: int
    """The parent's index in the list; -1 for the root of a cache scope."""
    start: int
    tokens: int
    pages: int
    """Pages that this node accounts for."""
    state: Literal["in_use", "leased", "evictable"]
    locks: int = 0
    """The number of running requests that need the node."""
    owners: tuple[str, ...] = ()
    """At most four of the programs whose leases end here."""
    hidden: int = 0
    """The number of children that are not in the list."""
    has_state: bool = False
    """The node holds a state of linear attention layers at its end."""


class QueueShare(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one program in the scheduler, each counted once."""

    program: str
    """The program's id; empty for the requests of no program."""
    running: int
    waiting: int
    retracted: int
    """Requests that wait again after a retraction."""
    compiling: int
    """Requests that wait for their grammars."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's queue and tree for people to look at, within the bounds of `GetSnapshot`."""

    nodes: tuple[TreeNode, ...]
    """Parents before their children; in use first, then the most recently used."""
    queue: tuple[QueueShare, ...]
    """The programs with most requests first."""
    queue_hidden: int
    """The number of programs that are not in `queue`."""


class Transferred(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The amount that an export has written, or an import has added to the prefix tree."""

    tokens: int
    """Tokens of the prefix, from its first on, that the KV snapshot has, or the tree has now."""
    bytes: int
    """Size of the KV pages that were copied."""


class HeldPrefix(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A prefix in the tree; those that programs lease come first, then the most recently used."""

    scope: str
    """The tree's: see `ExportPrefix`."""
    ids: tuple[int, ...]
    owners: tuple[str, ...] = ()
    """Programs that lease it."""


class Reply(Message, frozen=True, kw_only=True):
    """Answer to a control message."""

    rid: str
    stats: SchedulerStats | None = None
    snapshot: Snapshot | None = None
    lora: str = ""
    """The revision of the LoRA adapter that was loaded."""
    transferred: Transferred | None = None
    prefixes: tuple[HeldPrefix, ...] = ()


class TokenIds(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The ids of a prompt, and their entries in the vocabulary."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]


class Texts(Message, frozen=True, kw_only=True):
    """Answer to `Tokenize`, with `prompts`, and to `Detokenize`, with texts: of all ids (`whole`), and of the
    wanted ids (`text`)."""

    rid: str
    prompts: tuple[TokenIds, ...] = ()
    whole: tuple[str, ...] = ()
    text: tuple[str, ...] = ()


class PageRun(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Pages of the prefix tree, each of which follows the one before it."""

    scope: str
    """The tree's, which names the LoRA adapter too (`ramify.runtime.lora_names.tree_scope`)."""
    before: int | None
    """The digest of the page before the first; None where the run begins with the sequence."""
    digests: tuple[int, ...]
    tokens: bytes
    """int32, native, a page's number of them for each digest."""


class TreeChange(Message, frozen=True, kw_only=True):
    """Changes of one step in the prefix tree, as digests of page ends; sent where there are replicas, and
    where KV events are published.

    The fields are those of `ramify.runtime.fleet.index.TreeEvents`, and with KV events the runs of the added
    pages.
    """

    epoch: int
    number: int
    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    whole: bool = False
    runs: tuple[PageRun, ...] = ()


class Ready(Message, frozen=True, kw_only=True):
    """A process of the engine core is up. The tokenizer and the scheduler each fill in what they know."""

    role: str
    pid: int
    error: ErrorInfo | None = None
    """The reason why the process could not start."""
    chat_format: ChatFormat | None = None
    model_info: ModelInfo | None = None
    max_prompt_tokens: int = 0
    page_bytes: int = 0
    """Size of a KV page over all layers; 0 where pages are not transferred."""


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
    | GetTree
    | GetPrefixes
    | ExportPrefix
    | ImportPrefix
)
"""Messages that the tokenizer passes on unchanged, so that they stay in order with the requests."""
ToTokenizer = Generate | Tokenize | Detokenize | Forwarded
ToScheduler = Submit | Forwarded | GrammarReady | GrammarFailed | CompilerDied
ToDetokenizer = StepOutput | Reply | Failed
ToFrontend = StepText | Reply | Texts | Failed | Ready | TreeChange
