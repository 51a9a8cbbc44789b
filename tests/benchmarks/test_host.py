"""`benchmarks.host` with few steps."""

from __future__ import annotations

import pytest

from benchmarks import host, host_server


@pytest.mark.parametrize("further", [[], ["--overlap"]])
def test_a_line_for_each_batch_has_the_times_of_each_case(
    further: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    host.main(["--steps", "3", "--prompt", "40", "--batches", "1", "6", *further])
    head, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "6"]
    for line in lines:
        times = [float(figure) for figure in line.split()[1:]]
        assert len(times) == 3 * len(host.CASES)
        assert min(times) > 0
    assert all(case in head for case in host.CASES)


def test_a_request_that_is_refused_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="not all requests were decoding"):
        host.step_time(1, "free", 3, prompt=1 << 17)


@pytest.mark.slow
@pytest.mark.weights  # for the tokenizer
def test_a_server_has_a_line_for_each_case_and_each_token(capsys: pytest.CaptureFixture[str]) -> None:
    host.main(["--server", "--requests", "2", "--rounds", "1"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert all(role in head for role in host_server.ROLES)
    assert [line[:26].rstrip() for line in lines] == [*host_server.CASES, *host_server.TOKENS]
    for line in lines[: len(host_server.CASES)]:
        server, tokenizer, _, detokenizer, *_ = (float(figure) for figure in line[26:].split()[:5])
        assert min(server, tokenizer, detokenizer) > 0
