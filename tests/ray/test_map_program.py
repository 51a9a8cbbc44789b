"""`rm.ray.map_program` on a Ray cluster: columns, errors, killed actors and drivers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest

import ramify as rm
from tests.ray.killed_map import FIRST, ROWS, SECOND, Doubling, doubled

pytestmark = pytest.mark.ray


class Order(pydantic.BaseModel):
    item: str
    note: str | None = None


def order_backend() -> rm.ScriptedBackend:
    answers = {
        "mood": " good",
        "order": lambda request: Order(item=request.prompt[-1].split()[1]),
        "sizes": [[1, 2]] * 1000,
    }
    return rm.ScriptedBackend(answers)


@rm.function
def read_order(s, text, mark="-"):
    if text == "bad 7":
        raise ValueError("seven")
    s += f"Order {text} {mark}" + rm.gen("order", schema=Order)
    s += rm.gen("sizes", schema=list[int])
    s += rm.select("mood", choices=[" good", " bad"])
    return {"good": True}[s["mood"].strip()]


def test_rows_become_columns_and_errors_a_column(ray_cluster: Any, tmp_path: Path) -> None:
    rows = [{"text": f"bad {n}" if n == 7 else f"kettle{n} x", "place": n} for n in range(40)]
    dataset = ray_cluster.data.from_items(rows, override_num_blocks=4)
    done = rm.ray.map_program(
        dataset,
        read_order,
        engine=order_backend,
        mark="!",
        columns={"order": Order, "mood": Literal[" good", " bad"]},
        concurrency=1,
        rows_per_batch=8,
        rows_in_flight=8,
    )
    done.write_parquet(str(tmp_path / "out"))
    read = ray_cluster.data.read_parquet(str(tmp_path / "out"))
    found = sorted(read.take_all(), key=lambda row: row["place"])
    assert [row["text"] for row in found] == [row["text"] for row in rows]
    failed = found.pop(7)
    assert (failed["order"], failed["mood"], failed["returned"]) == (None, None, None)
    assert (failed["error"]["type"], failed["error"]["transient"]) == ("ValueError", False)
    for row in found:
        assert row["order"] == {"item": f"kettle{row['place']}", "note": None}
        assert (row["mood"], list(row["sizes"]), row["returned"]) == (" good", [1, 2], True)
        assert row["error"] is None
        assert row["usage"]["requests"] == 3
    assert len({row["row_id"] for row in found}) == 39


def test_the_first_failed_row_fails_the_job_if_it_is_to(ray_cluster: Any) -> None:
    dataset = ray_cluster.data.from_items([{"text": "bad 7"}])
    done = rm.ray.map_program(dataset, read_order, engine=order_backend, on_error="raise", concurrency=1)
    with pytest.raises(Exception, match="The program raised ValueError: seven"):
        done.take_all()


def test_an_async_program_runs(ray_cluster: Any) -> None:
    @rm.function
    async def ask(s, q):
        s += q + rm.gen("answer")
        return await s.aget("answer")

    done = rm.ray.map_program(
        ray_cluster.data.from_items([{"q": f"Q{n}"} for n in range(20)]),
        ask,
        engine=lambda: rm.ScriptedBackend(lambda request: request.prompt[0][1:]),
        concurrency=1,
    )
    assert sorted(int(row["returned"]) for row in done.take_all()) == list(range(20))


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_actor_and_a_killed_driver_lose_and_double_no_row(ray_cluster: Any, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = [sys.executable, "-m", "tests.ray.killed_map", str(tmp_path), str(fifo)]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with fifo.open() as opened:
            assert opened.read(1) == "!"  # row SECOND runs, and does not end
    finally:
        driver.kill()
        driver.wait()
    assert (tmp_path / "died").exists()
    first = [int(line) for line in (tmp_path / "requests").read_text().split()]
    (tmp_path / "requests").unlink()

    found = doubled(ray_cluster, Doubling(tmp_path), str(tmp_path / "done")).take_all()

    assert Counter(row["n"] for row in found) == Counter(range(ROWS))
    assert all(row["x"] == 2 * row["n"] for row in found)
    second = [int(line) for line in (tmp_path / "requests").read_text().split()]
    assert set(first) | set(second) == set(range(ROWS))
    assert {FIRST, SECOND} <= set(first)
    assert SECOND in second
    # At each death at most 128 rows have begun and have no line: 64 threads, and twice that in their queue.
    assert len(first) - len(set(first)) <= 128
    assert len(set(first) & set(second)) <= 128
