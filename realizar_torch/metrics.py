"""What the numbers mean: one arithmetic definition for every time and rate this package prints."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GenerationMetrics:
    """One generation in numbers. Times are in seconds since the request was accepted; None means not reached.

    prompt_tokens and new_tokens count over all rows of the batch; padding is not counted. first_token: when
    the first new token of every row was known on the host. last_token: the same for the latest one. rows:
    batch size.
    """

    prompt_tokens: int
    new_tokens: int
    rows: int
    first_token: float | None = None
    last_token: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the accepted request to the first token: prefill and one choice, without loading."""
        return self.first_token

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """Prompt tokens over the time to first token."""
        return rate(self.prompt_tokens, self.first_token)

    @property
    def tokens_per_second(self) -> float | None:
        """Decode rate: tokens after each row's first, over the time since the first token."""
        if self.first_token is None or self.last_token is None:
            return None
        return rate(self.new_tokens - self.rows, self.last_token - self.first_token)

    def as_dict(self) -> dict[str, float | int | None]:
        """The counts, times and rates under the names that ``--json`` prints."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "time_to_first_token": self.time_to_first_token,
            "prompt_tokens_per_second": self.prompt_tokens_per_second,
            "tokens_per_second": self.tokens_per_second,
        }


def rate(count: int, seconds: float | None) -> float | None:
    """``count`` per second, or None where there is nothing to divide."""
    return count / seconds if seconds and count > 0 else None


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Arithmetic mean and sample standard deviation (0 for a single value), as llama-bench prints them."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
