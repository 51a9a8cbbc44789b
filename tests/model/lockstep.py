"""The ranks of a model as threads of one process, instead of processes with torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ramify.runtime.model.decoder import Model
from ramify.runtime.model.layers import Reduce
from ramify.runtime.model.loading.load import load_model, read_config
from ramify.runtime.model.shape.config import part_of

T = TypeVar("T")


class Lockstep:
    """Sums the terms of `count` ranks. One thread runs at a time: kernels share their scratch memory."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sums = 0
        self._turn = threading.Condition()
        self._terms: dict[int, Tensor] = {}
        self._total: Tensor | None = None
        self._failed = False

    def reduce_of(self, index: int) -> Reduce:
        def reduce(term: Tensor) -> Tensor:
            self._terms[index] = term
            place = self.sums
            if len(self._terms) == self.count:
                self._total = torch.stack([self._terms[each] for each in range(self.count)]).sum(0)
                self._terms = {}
                self.sums += 1
                self._turn.notify_all()
            self._turn.wait_for(lambda: self.sums > place or self._failed)
            assert not self._failed, "another rank has failed"
            return self._total.clone()

        return reduce

    def run(self, bodies: Sequence[Callable[[], T]]) -> list[T]:
        """The results of the bodies, each run by the thread of a rank. Raises the first error of any."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def target(index: int) -> None:
            with self._turn:
                try:
                    results[index] = bodies[index]()
                except BaseException as error:  # to be raised in the test's thread
                    errors.append(error)
                    self._failed = True
                    self._turn.notify_all()

        threads = [threading.Thread(target=target, args=(index,)) for index in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[index] for index in range(len(bodies))]


def load_parts(files: Any, count: int, **options: Any) -> tuple[Lockstep, list[Model]]:
    """The model of `files` in `count` parts that sum in lockstep."""
    whole, lockstep = read_config(files.weights), Lockstep(count)
    models = []
    for index in range(count):
        model = load_model(files, shape=part_of(whole, index, count), **options)
        model.join(lockstep.reduce_of(index))
        models.append(model)
    return lockstep, models
