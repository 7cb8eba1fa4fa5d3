"""Counters of the server, for Prometheus, beside the engine's."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from jaxshare import __version__

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)


class HttpMetrics:
    """The server's counters.

    Args:
      model: the name under which the model is served.

    Attributes:
      registry: the registry that Prometheus reads.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        build = Gauge(
            "jaxshare_build_info",
            "1, with the version of jaxshare and the name of the model as labels",
            ["version", "model"],
            registry=self.registry,
        )
        build.labels(__version__, model).set(1)
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
