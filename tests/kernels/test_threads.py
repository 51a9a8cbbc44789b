from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ramify.kernels.machine.threads import on_threads


def threads_of_a_new_thread() -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


def test_each_thread_computes_alone_and_no_other_one_does() -> None:
    before = torch.get_num_threads()
    seen: dict[int, tuple[int, int]] = {}

    def work(item: int) -> None:
        torch.ones(1 << 17).mul(item)
        seen[item] = torch.get_num_threads(), threads_of_a_new_thread()

    torch.set_num_threads(3)
    try:
        on_threads(work, range(20))
        assert seen == dict.fromkeys(range(20), (1, 3))
        assert (torch.get_num_threads(), threads_of_a_new_thread()) == (3, 3)
    finally:
        torch.set_num_threads(before)


def test_what_a_thread_raises_is_raised() -> None:
    def fail(item: int) -> None:
        if item == 3:
            raise ValueError("the fourth")

    with pytest.raises(ValueError, match="the fourth"):
        on_threads(fail, range(5))
