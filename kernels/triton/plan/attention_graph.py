"""Plans at fixed addresses and of fixed size, so that a captured CUDA graph is replayed with new lengths.

A graph launches a program for each item that it has room for, so graphs of several sizes are captured, and a
step takes the smallest that holds its plan. Example, 8 KV heads and 32 heads, one decode:

    context   items of the plan   level   room   programs of attention and merge   with work
    200        1                   0        1       8                                 8
    1k         4                   2        4      32 + 32                           32 + 32
    8k        32                   5       32     256 + 32                          256 + 32

255 decodes of 200 beside one of 8k have 287 items and one token to merge. With room to merge every token the
merge launches 8,192 programs, 32 of them with work; so a form also says how many tokens it can merge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ramify.kernels.triton.plan.attention_config import CHUNK, Tile
from ramify.kernels.triton.plan.attention_plan import PROGRAMS_A_PROCESSOR, Launch, Merge, Plan, Shape
from ramify.kernels.triton.tiles.attention_tile import ITEM_FIELDS

_FIELDS = int(ITEM_FIELDS)


class Form(NamedTuple):
    """The launches of the plan of a step of decodes, their sizes rounded up.

    level : the flat launch (without a cascade) has room for 2 ** level items a sequence
    merges : most tokens whose states are merged; 0: no merge is launched
    listed : the launches of the cascade: each a tile and the most items, a power of two
    """

    level: int
    merges: int
    listed: tuple[tuple[Tile, int], ...] = ()

    def holds(self, other: Form) -> bool:
        """Whether plans of the form `other` fit into this one, at the same or a larger size."""
        room = dict(self.listed)
        return (
            self.level >= other.level
            and self.merges >= other.merges
            and all(room.get(tile, 0) >= items for tile, items in other.listed)
        )


class TokenForm(NamedTuple):
    """The launches of the plan of a step that may have prefills, their sizes rounded up to powers of two.

    launches : (tile, listed, items)
    listed_tokens : length of the list of tokens of listed items
    states : softmax states of all tokens together, each with a row for each query head of a KV head; 0 if no
        states are merged
    """

    launches: tuple[tuple[Tile, bool, int], ...]
    listed_tokens: int
    states: int

    def holds(self, other: TokenForm) -> bool:
        """Whether plans of the form `other` fit into this one, at the same or a larger size."""
        room = {(tile, listed): items for tile, listed, items in self.launches}
        return (
            self.listed_tokens >= other.listed_tokens
            and self.states >= other.states
            and all(room.get((tile, listed), 0) >= items for tile, listed, items in other.launches)
        )


LEAST_ITEMS = 16
"""The least room of a launch, so that small steps share few forms."""


LEAST_CASCADE = 128
"""The least room of each launch of `cascade_form`."""
LEAST_MIXED = 64
"""The least room of each launch of `mixed_form`."""


def token_form_of(plan: Plan, tokens: int) -> TokenForm:
    """The smallest form for steps of up to `tokens` tokens that has room for `plan`. If any states are
    merged, there is room for at least one state a token."""
    group = plan.shape.heads // plan.shape.kv_heads
    states = 0
    if plan.merge is not None:
        states = rounded_up(max(tokens, len(plan.merge.index), -(-plan.state_rows // group)))
    launches = tuple(
        (launch.tile, launch.listed, rounded_up(max(len(launch.items), LEAST_ITEMS)))
        for launch in plan.launches
    )
    return TokenForm(launches, rounded_up(len(plan.tokens)), states)


def rounded_up(count: int) -> int:
    """`count` rounded up to a power of two; 0 stays 0."""
    return 1 << (count - 1).bit_length() if count else 0


def form_of(plan: Plan, sequences: int) -> Form:
    """The smallest form for steps of `sequences` decodes that has room for `plan`.

    With a cascade there is room to merge every token, as most have a state of a shared node.
    """
    one = _flat(plan.shape, 1)[1]
    items = sum(len(launch.items) for launch in plan.launches if not launch.listed)
    level = max(-(-items // (one * sequences)) - 1, 0).bit_length()
    listed = [
        (launch.tile, 1 << (len(launch.items) - 1).bit_length()) for launch in plan.launches if launch.listed
    ]
    if listed:
        return Form(max(level, 1), sequences, tuple(listed))
    merges = 0 if plan.merge is None else min(rounded_up(len(plan.merge.tokens)), sequences)
    return Form(level, merges)


def full_form(level: int, sequences: int) -> Form:
    """The form of plans without a cascade with room to merge every token. At level 0 no sequence is cut, so
    nothing is merged."""
    return Form(level, sequences if level else 0)


def cascade_form(shape: Shape, sequences: int, level: int) -> Form:
    """A form for cascades over `sequences` decodes: each tile has room for two items a sequence, and for as
    many as a small batch is cut into to fill the device."""
    items = rounded_up(max(2 * sequences, LEAST_CASCADE))
    return Form(max(level, 1), sequences, tuple((tile, items) for tile in shape.tiles))


def mixed_form(shape: Shape, tokens: int, states: int, *, listed_tokens: int) -> TokenForm:
    """A form for steps of up to `tokens` tokens that mix prompts and decodes. Each tile has room for an item
    for every second token, without a cascade and, if `listed_tokens` is not 0, with one."""
    items = rounded_up(max(tokens // 2, LEAST_MIXED))
    kinds = (False, True) if listed_tokens else (False,)
    launches = tuple((tile, listed, items) for listed in kinds for tile in shape.tiles)
    return TokenForm(launches, listed_tokens, states)


def highest_level(shape: Shape, sequences: int, positions: int) -> int:
    """The highest level of flat plans of up to `sequences` decodes over up to `positions` positions in all.

    `attention_plan` makes one item a sequence and, by its balance of work and states, about sqrt(positions *
    programs at once / (128 * KV heads)) more. This level has room for twice that number of additional items.
    Parts of deterministic plans may be as short as CHUNK positions at any load.
    """
    slots = shape.device.processors * PROGRAMS_A_PROCESSOR
    more = 2 * math.isqrt(positions * slots // (128 * shape.kv_heads) + 1)
    items = sequences + (positions // CHUNK if shape.deterministic else more)
    return max(-(-items // sequences) - 1, 0).bit_length()


def launches_of(shape: Shape, form: Form, sequences: int) -> list[tuple[Tile, bool, int]]:
    """The launches (tile, listed, items) of `form`."""
    tile, items = _flat(shape, sequences)
    return [(tile, False, items << form.level), *((each, True, room) for each, room in form.listed)]


def _flat(shape: Shape, sequences: int) -> tuple[Tile, int]:
    """The tile for `sequences` decodes, and the number of work items if no sequence is cut along its
    positions."""
    group = shape.heads // shape.kv_heads
    tile = next((tile for tile in shape.tiles if tile.rows >= group), shape.tiles[-1])
    return tile, sequences * -(-group // tile.rows)


class StaticPlan:
    """The buffers of one captured step.

    Capture `attention.run_plan` with `plan`. Before each replay `load` the plan of the step, made with
    ``device=torch.device("cpu")``. Unused items are empty and write nothing.

    Parameters
    ----------
    shape : the shape of every plan that is loaded
    tokens : most query tokens of the step
    forms : (tile, listed, items)
        The launches, and the most items of each.
    listed_tokens : most tokens of the cascade's nodes; a token counts once for each level of the tree
    states : most states of all tokens together; a state has a row for each query head of a KV head. 0: no
        states are left, and no merge is launched.
    merges : most tokens whose states are merged; None: all
    space : float32 on `device`, at least ``state_bytes(shape, states) // 4`` numbers, for the states; plans
        that run one after the other may share it. None: each run allocates its own.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        *,
        tokens: int,
        forms: Sequence[tuple[Tile, bool, int]],
        states: int,
        merges: int | None = None,
        listed_tokens: int = 0,
        space: torch.Tensor | None = None,
    ) -> None:
        group = shape.heads // shape.kv_heads
        self._forms = list(forms)
        self.programs = shape.kv_heads * sum(count for _, _, count in forms)
        """Programs of a layer that the step launches, with and without work."""
        sizes = [count * _FIELDS for _, _, count in forms]
        merged = (tokens if merges is None else merges) if states else 0
        self.programs += shape.heads * merged
        sizes += [listed_tokens, merged, merged + 1, states]
        places = [0]
        for size in sizes:
            places.append(places[-1] + -(-size // 4) * 4)
        self._staged = torch.zeros(places[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(places[-1], dtype=torch.int32, device=device)
        self._copied = torch.Event(device) if device.type == "cuda" else None
        self._rooms = [self._staged[at : at + size] for at, size in zip(places, sizes, strict=False)]
        views = [self._device[at : at + size] for at, size in zip(places, sizes, strict=False)]
        launches = tuple(
            Launch(tile, listed, view.view(-1, _FIELDS))
            for (tile, listed, _), view in zip(forms, views, strict=False)
        )
        named, *merge = views[len(launches) :]
        self.plan = Plan(shape, launches, named, states * group, Merge(*merge) if states else None, space)

    def load(self, plan: Plan) -> bool:
        """Copy `plan`, whose tensors are on the host, into the buffers. If it does not fit, change nothing
        and return False."""
        found = {(launch.tile, launch.listed): launch.items for launch in plan.launches}
        none = torch.zeros(0, dtype=torch.int32)
        items = [found.pop((tile, listed), none) for tile, listed, _ in self._forms]
        merge = [none, none, none]
        if plan.merge is not None:
            merge = [plan.merge.tokens, plan.merge.starts, plan.merge.index]
        pieces = [*(each.flatten() for each in items), plan.tokens, *merge]
        fits = all(len(piece) <= len(room) for piece, room in zip(pieces, self._rooms, strict=True))
        if found or not fits or plan.state_rows > self.plan.state_rows:
            return False
        if self._copied is not None:
            self._copied.synchronize()  # the previous copy still reads the staging buffer
        for piece, room in zip(pieces, self._rooms, strict=True):
            room[: len(piece)] = piece
            room[len(piece) :] = 0
        starts = self._rooms[-2]
        starts[len(merge[1]) :] = starts[len(merge[1]) - 1] if len(merge[1]) else 0
        self._device.copy_(self._staged, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return True


def state_bytes(shape: Shape, states: int) -> int:
    """Bytes of `states` softmax states: values, maximum and sum in float32 for each query head."""
    return 4 * (shape.head_dim + 2) * shape.heads * states
