"""A plan at fixed addresses and of fixed size, so that a captured CUDA graph is replayed with new lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ramify.kernels.triton.plan.attention_config import Tile
from ramify.kernels.triton.plan.attention_plan import PROGRAMS_A_PROCESSOR, Launch, Merge, Plan, Shape
from ramify.kernels.triton.tiles.attention_tile import ITEM_FIELDS

_FIELDS = int(ITEM_FIELDS)


def decode_forms(
    shape: Shape, sequences: int, pool_tokens: int, *, cascade: bool
) -> list[tuple[Tile, bool, int]]:
    """The launches (tile, listed, items) of plans of up to `sequences` decodes over `pool_tokens` positions.

    `attention_plan` makes one item a sequence and, by its balance of work and states, about
    sqrt(pool_tokens * programs at once / (128 * KV heads)) more; this is room for twice as many of
    the latter. An unused item costs a program that ends at once. `cascade` adds a launch for each tile.
    """
    slots = shape.device.processors * PROGRAMS_A_PROCESSOR
    items = sequences + 2 * math.isqrt(pool_tokens * slots // (128 * shape.kv_heads) + 1)
    group = shape.heads // shape.kv_heads
    tile = next((tile for tile in shape.tiles if tile.rows >= group), shape.tiles[-1])
    forms = [(tile, False, items * -(-group // tile.rows))]
    return forms + [(each, True, items) for each in shape.tiles] if cascade else forms


class StaticPlan:
    """The buffers of one captured step.

    Capture `attention.run_plan` with `plan`. Before each replay `load` the step's own plan, made with
    ``device=torch.device("cpu")``. Unused items are empty and write nothing.

    Parameters
    ----------
    shape : of every plan that is loaded
    tokens : most query tokens of the step
    forms : (tile, listed, items)
        The launches, and the most items of each.
    listed_tokens : most tokens of cascade's nodes; a token counts once for each level of the tree
    states : most states of all tokens together; a state has a row for each query head of a KV head
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        *,
        tokens: int,
        forms: Sequence[tuple[Tile, bool, int]],
        states: int,
        listed_tokens: int = 0,
    ) -> None:
        group = shape.heads // shape.kv_heads
        self._forms = list(forms)
        sizes = [count * _FIELDS for _, _, count in forms]
        sizes += [listed_tokens, tokens, tokens + 1, states]
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
        self.plan = Plan(shape, launches, named, states * group, Merge(*merge))

    def load(self, plan: Plan) -> bool:
        """Copy `plan`, on the host, into the buffers. If it does not fit, change nothing and return False."""
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
