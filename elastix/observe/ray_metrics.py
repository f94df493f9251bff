"""A run's events to Ray's metrics endpoint. The only reader that knows Ray.

Ray exports them from the process that reads, on every node's endpoint, as `ray_elastix_NAME`
(counters as `ray_elastix_NAME_total`). Recording a value takes some 2 microseconds.
"""

import threading
from collections.abc import Sequence

from ray.util.metrics import Counter, Gauge, Histogram

from elastix.events import Event
from elastix.observe.metric_series import SERIES, Readings

PREFIX = "elastix_"

_REFRESH_S = 0.5
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Metrics:
    """Reads the events of one run (or campaign), whose name is the label `run` of all series.

    Ray forgets a gauge as soon as it has exported it, so a thread says the last values again and
    again until `close`, or the end of the process.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._series: dict[str, tuple[Counter | Gauge | Histogram, tuple[str, ...]]] = {}
        for series in SERIES:
            name, tags = PREFIX + series.name, ("run", *series.tags)
            if series.kind == "gauge":
                metric: Counter | Gauge | Histogram = Gauge(name, series.help, tags)
            elif series.kind == "counter":
                metric = Counter(name, series.help, tags)
            else:
                metric = Histogram(name, series.help, list(_SECONDS), tags)
            self._series[series.name] = (metric, series.tags)
        self._readings = Readings(self)
        self._gauges: dict[tuple[str, ...], float] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._refresh, name="metrics", daemon=True).start()

    def read(self, event: Event) -> None:
        """Show what the event means on the endpoint. Never blocks."""
        self._readings.read(event)

    def close(self) -> None:
        """The run is over: its gauges disappear from the endpoint, its counters stay."""
        self._closed.set()

    def put(self, name: str, value: float, *labels: str) -> None:
        """See Sink."""
        metric, keys = self._series[name]
        if isinstance(metric, Gauge):
            self._gauges[name, *labels] = value  # the thread says it
        elif isinstance(metric, Histogram):
            metric.observe(value, self._tags(keys, labels))
        elif value > 0:  # Ray refuses to count nothing
            metric.inc(value, self._tags(keys, labels))

    def _refresh(self) -> None:
        while not self._closed.wait(_REFRESH_S):
            for name, *labels in tuple(self._gauges):
                with self._lock:  # or one that is forgotten meanwhile would be back
                    value = self._gauges.get((name, *labels))
                    metric, keys = self._series[name]
                    if value is not None and isinstance(metric, Gauge):
                        metric.set(value, self._tags(keys, labels))

    def _tags(self, keys: Sequence[str], labels: Sequence[str]) -> dict[str, str]:
        return {"run": self._run, **dict(zip(keys, labels, strict=True))}

    def forget(self, name: str, *labels: str) -> None:
        """See Sink."""
        with self._lock:
            for key in [k for k in self._gauges if k[: 1 + len(labels)] == (name, *labels)]:
                del self._gauges[key]
