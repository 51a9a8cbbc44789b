"""A plan at fixed addresses and of fixed size: a captured CUDA graph is replayed with new lengths."""

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
    """Room for the plans of up to `sequences` decodes whose keys and values lie in `pool_tokens` positions.

    Twice the items that `attention_plan` makes of them at the most, by its own balance of work and states:
    sqrt(positions · programs at once / (128 · KV heads)) and one a sequence. An item not used costs a program
    that ends at once. With `cascade` there is a launch more for each tile.
    """
    slots = shape.device.processors * PROGRAMS_A_PROCESSOR
    items = sequences + 2 * math.isqrt(pool_tokens * slots // (128 * shape.kv_heads) + 1)
    group = shape.heads // shape.kv_heads
    tile = next((tile for tile in shape.tiles if tile.rows >= group), shape.tiles[-1])
    forms = [(tile, False, items * -(-group // tile.rows))]
    return forms + [(each, True, items) for each in shape.tiles] if cascade else forms


class StaticPlan:
    """The memory of one captured step.

    Capture `attention.run_plan` with `plan`; before each replay `load` the step's own plan, made with
    ``device=torch.device("cpu")``. Items that are not there are empty, and so write nothing.

    Parameters
    ----------
    shape : of every plan that is loaded
    tokens : query tokens of the step at the most
    forms : (tile, listed, items)
        The launches, and room for their items.
    listed_tokens : room for the tokens of cascade's nodes, each counted once a level of the tree
    states : states of all tokens together at the most; each is a row a query head of a KV head
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
        """Copy `plan`, on the host, here; False, with nothing changed, where it does not fit."""
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
            self._copied.synchronize()  # the copy before has read what is overwritten now
        for piece, room in zip(pieces, self._rooms, strict=True):
            room[: len(piece)] = piece
            room[len(piece) :] = 0
        starts = self._rooms[-2]
        starts[len(merge[1]) :] = starts[len(merge[1]) - 1] if len(merge[1]) else 0
        self._device.copy_(self._staged, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return True
