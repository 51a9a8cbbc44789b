"""The summary of one run of a batch, as text and as HTML for notebooks."""

from __future__ import annotations

from dataclasses import dataclass, field

from ramify.html.fragment import escaped, fragment, head, table, tag
from ramify.lang.batch.checkpoint import CHANGED
from ramify.messages import Usage


@dataclass(slots=True)
class BatchSummary:
    """The counts, times and tokens of one run of a batch."""

    rows: int = 0
    """Number of rows that this run finished, including failed rows."""
    failed: int = 0
    skipped: int = 0
    """Number of rows that were not run because an earlier run had finished them."""
    duration_s: float = 0.0
    usage: Usage = field(default_factory=Usage)
    """Sum of the usage of all requests of this run."""
    failed_before: int = 0
    """Number of skipped rows whose result is a failure."""
    others: int = 0
    """Number of results in the file whose rows are not in the input. 0 if the batch was stopped, because its
    input was not read to the end."""
    outdated: int = 0
    """Number of results in the file that are of another version of the program, its options or its model."""
    first_error: str | None = None
    stopped: str | None = None
    """Reason why the batch ended before its last row; None if every row has a result."""
    left: int = 0
    """Number of rows without a result in a stopped batch. Rows that were not read are counted only if the
    input has a length."""

    @property
    def _mixed(self) -> str:
        """Sentence about results of another version, and the option that runs their rows again; empty if the
        file has none."""
        if not self.outdated:
            return ""
        return (
            f"{self.outdated} results in the file are of another version of the program, its options or its "
            f"model; {CHANGED}, with all rows, runs them again"
        )

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.duration_s if self.duration_s else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return self.usage.completion_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens (computed and cached) plus output tokens, per second."""
        total = self.usage.prompt_tokens + self.usage.completion_tokens
        return total / self.duration_s if self.duration_s else 0.0

    @property
    def cached_share(self) -> float:
        """The share of prompt tokens that were cached."""
        return self.usage.cached_tokens / self.usage.prompt_tokens if self.usage.prompt_tokens else 0.0

    def _repr_html_(self) -> str:
        rows = [
            ("rows", f"{self.rows:,}", f"{self.rows_per_s:.1f} a second"),
            ("failed", f"{self.failed:,}", ""),
            ("done before", f"{self.skipped:,}", ""),
            (
                "output tokens",
                f"{self.usage.completion_tokens:,}",
                f"{self.output_tokens_per_s:.0f} a second",
            ),
            ("prompt tokens", f"{self.usage.prompt_tokens:,}", f"{self.cached_share:.0%} cached"),
        ]
        parts = [head("Batch", f"{self.duration_s:.1f} s"), table(rows)]
        if self.first_error is not None:
            parts.append(tag("div", f"first error: {escaped(self.first_error)}", "bad"))
        if self._mixed:
            parts.append(tag("div", escaped(self._mixed), "bad"))
        if self.stopped is not None:
            left = f"stopped: {self.stopped}\n{self.left} rows are left; run the same again to go on"
            parts.append(tag("div", escaped(left), "bad"))
        return fragment(parts)

    def __str__(self) -> str:
        skipped = f", {self.skipped} were done before" if self.skipped else ""
        if self.failed_before:
            skipped += f" ({self.failed_before} of them failed: rerun failed runs them again)"
        if not self.rows and self.skipped and self.stopped is None:
            lines = [f"no row was left to run{skipped}"]
        else:
            lines = [
                f"{self.rows} rows in {self.duration_s:.1f} s ({self.rows_per_s:.1f} rows/s), "
                f"{self.failed} failed{skipped}",
                f"{self.output_tokens_per_s:.0f} output tokens/s, {self.tokens_per_s:.0f} tokens/s in all, "
                f"{self.cached_share:.0%} of {self.usage.prompt_tokens} prompt tokens cached",
            ]
        if self.first_error is not None:
            lines.append(f"first error: {self.first_error}")
        if self.others:
            lines.append(f"the file has {self.others} more results, of rows other than these")
        if self._mixed:
            lines.append(self._mixed)
        if self.stopped is not None:
            lines.append(
                f"stopped: {self.stopped}\n{self.rows + self.skipped} rows are done, {self.left} are left; "
                "run the same again to go on"
            )
        return "\n".join(lines)


def cost(usage: Usage, price: tuple[float, float, float]) -> float:
    """The price of `usage`. `price`: prices per million computed prompt tokens, cached prompt tokens, and
    output tokens."""
    computed = usage.prompt_tokens - usage.cached_tokens
    tokens = (computed, usage.cached_tokens, usage.completion_tokens)
    return sum(count * one for count, one in zip(tokens, price, strict=True)) / 1e6
