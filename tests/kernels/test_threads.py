import threading

import pytest
import torch

from ramify.kernels.threads import on_threads


def test_each_thread_computes_alone_and_the_process_does_not() -> None:
    before = torch.get_num_threads()
    seen: dict[int, int] = {}

    def work(item: int) -> None:
        torch.ones(1 << 17).mul(item)
        seen[item] = torch.get_num_threads()

    later: list[int] = []
    torch.set_num_threads(3)
    try:
        on_threads(work, range(20))
        here = torch.get_num_threads()
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert seen == dict.fromkeys(range(20), 1)
    assert (here, later) == (3, [3])


def test_what_a_thread_raises_is_raised() -> None:
    def fail(item: int) -> None:
        if item == 3:
            raise ValueError("the fourth")

    with pytest.raises(ValueError, match="the fourth"):
        on_threads(fail, range(5))
