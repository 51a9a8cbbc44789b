"""States of linear attention layers: slots, copies, and what the scheduler does with both."""

from __future__ import annotations

import numpy as np
import torch

from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.state_pool import StatePool
from ramify.runtime.model.state_shape import StateShape

SHAPE = StateShape(layers=2, channels=6, width=4, heads=2, key_dim=4, value_dim=3)


def test_copies_of_slots_happen_all_at_once() -> None:
    pool = StatePool(SHAPE, num_slots=4)
    for slot in range(5):
        pool.conv[:, slot] = pool.recurrent[:, slot] = slot
    pool.copy([])
    pool.copy([(3, 0)])
    pool.copy([(0, 1), (1, 2), (2, 0)])  # a ring: each source is read before it is written
    assert pool.conv.shape == (2, 5, 6, 3)
    assert pool.recurrent.shape == (2, 5, 2, 4, 3)
    assert [int(slot) for slot in pool.recurrent[0, :, 0, 0, 0]] == [2, 3, 1, 3, 4]
    assert torch.equal(pool.conv[1, :, 0, 0], pool.recurrent[0, :, 0, 0, 0])


def test_a_batch_names_the_slot_of_each_request() -> None:
    ids = np.arange(8, dtype=np.int32)
    batch = pack([Extension(ids, 0, 3, (0,), 7), Extension(ids, 4, 5, (1,), 2)], page_size=8)
    assert batch.states is not None
    assert batch.states.tolist() == [7, 2]
    assert pack([Extension(ids, 0, 3, (0,))], page_size=8).states is None
