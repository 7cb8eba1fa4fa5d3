"""Counters of the server, for Prometheus, beside the engine's."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)


class HttpMetrics:
    """The server's counters.

    Attributes:
      registry: the registry that Prometheus reads.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "jaxshare_http_requests",
            "Requests, by path and status",
            ["path", "status"],
            registry=self.registry,
        )
        self._open = Gauge(
            "jaxshare_http_open_requests",
            "Requests without their whole answer",
            registry=self.registry,
        )
        self._gone = Counter(
            "jaxshare_http_disconnects",
            "Clients that did not wait for their answer",
            registry=self.registry,
        )
        self._seconds = Histogram(
            "jaxshare_http_seconds",
            "Seconds from a request to the end of its answer",
            ["path"],
            buckets=_SECONDS,
            registry=self.registry,
        )

    def begun(self) -> None:
        self._open.inc()

    def ended(self, path: str, status: int, seconds: float) -> None:
        self._open.dec()
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def gone(self) -> None:
        self._gone.inc()
