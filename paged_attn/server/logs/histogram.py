"""A histogram that takes many equal values at once: prometheus_client's own takes them one by one, and a step has hundreds of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class CountingHistogram:
    """Written by one thread, and read by any.

    Args:
        buckets: their upper bounds, ascending; one of all that is larger comes last.
    """

    def __init__(self, name: str, help: str, buckets: Sequence[float]) -> None:
        self._name, self._help, self._bounds = name, help, [*buckets, float("inf")]
        self._counts, self._sum = [0] * len(self._bounds), 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Metric:
        """What there is now, as Prometheus is told."""
        totals = zip(map(floatToGoString, self._bounds), map(float, accumulate(self._counts)), strict=True)
        return HistogramMetricFamily(self._name, self._help, buckets=list(totals), sum_value=self._sum)
