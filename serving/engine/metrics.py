"""Counters of the engine, for Prometheus. Each engine has a registry of its own."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.engine.request import Request

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The engine's counters.

        from prometheus_client import start_http_server
        start_http_server(9000, registry=engine.metrics.registry)

    Attributes:
      registry: the registry that Prometheus reads.
      passes: forward passes so far: those of prefill, of drafts, and those that sample.
      num_sampled: tokens sampled so far, stop tokens included.
      admitted_tokens: tokens of the prompts of admitted requests.
      reused: those of them that were cached when their requests were first admitted.
      compile_seconds: seconds in which the engine's own thread has compiled; sessions with passes
        of their own count theirs.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.passes = self.reused = self.admitted_tokens = self.num_sampled = 0
        self.compile_seconds = 0.0
        self._create_state_gauges()
        self._create_token_counters()
        self._create_request_counters()

    def _create_state_gauges(self) -> None:
        registry = self.registry
        self._rows = Gauge("jaxshare_rows", "Running requests", ["state"], registry=registry)
        self._contributions: dict[str, float] = {}
        self._contribution = Gauge(
            "jaxshare_contribution",
            "Contribution of each active agent to the whole, by which memory and passes are shared",
            ["agent"],
            registry=registry,
        )
        self._queue = Gauge("jaxshare_queue", "Waiting requests", registry=registry)
        self._bytes = Gauge(
            "jaxshare_bytes",
            "Bytes of keys and values by tier, of session leases, and of the Logits Cache",
            ["tier"],
            registry=registry,
        )
        self._bytes_limit = Gauge(
            "jaxshare_bytes_limit", "The most bytes of a tier", ["tier"], registry=registry
        )
        self._max_rows = Gauge(
            "jaxshare_max_rows", "The most requests that run at a time", registry=registry
        )

    def _create_token_counters(self) -> None:
        registry = self.registry
        self._passes = Counter(
            "jaxshare_passes", "Forward passes, by kind", ["kind"], registry=registry
        )
        self._tokens = Counter(
            "jaxshare_tokens",
            "Tokens of requests: prefilled, sampled, or taken from the Logits Cache: of requests that "
            "have ended, or that were followed",
            ["how"],
            registry=registry,
        )
        self._prompt = Counter(
            "jaxshare_prompt_tokens",
            "Tokens of admitted requests",
            ["agent"],
            registry=registry,
        )
        self._reused = Counter(
            "jaxshare_reused_tokens",
            "Tokens of admitted requests that were cached",
            ["agent"],
            registry=registry,
        )
        self._version = Gauge(
            "jaxshare_params_version", "Version of the model's weights", registry=registry
        )
        self._evicted = Counter(
            "jaxshare_evicted_tokens",
            "Tokens evicted from the accelerator, by destination: host memory, or none",
            ["to"],
            registry=registry,
        )
        self._fetched = Counter(
            "jaxshare_fetched_tokens", "Tokens fetched from host memory", registry=registry
        )
        self._drafted = Counter(
            "jaxshare_guessed_tokens",
            "Draft tokens from earlier outputs",
            ["were"],
            registry=registry,
        )

    def _create_request_counters(self) -> None:
        registry = self.registry
        self._finished = Counter(
            "jaxshare_calls", "Finished requests, by finish reason", ["end"], registry=registry
        )
        self._lookups = Counter(
            "jaxshare_logits_lookups",
            "Lookups in the Logits Cache",
            ["found"],
            registry=registry,
        )
        self._preempted = Counter("jaxshare_preemptions", "Preempted requests", registry=registry)
        self._compile = Counter(
            "jaxshare_compile_seconds", "Seconds in which the engine compiled", registry=registry
        )
        self._first_token = Histogram(
            "jaxshare_first_token_seconds",
            "Seconds from submission to the first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self._token_seconds = Histogram(
            "jaxshare_token_seconds",
            "Mean seconds between two tokens of a finished request, after its first token",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self._seconds = Histogram(
            "jaxshare_call_seconds",
            "Seconds from submission to the end",
            buckets=_SECONDS,
            registry=registry,
        )

    def admitted(self, request: Request, num_cached: int) -> None:
        self._prompt.labels(request.agent).inc(len(request.tokens))
        self._reused.labels(request.agent).inc(num_cached)
        if not request.preemptions:
            self.admitted_tokens += len(request.prompt)
            self.reused += min(num_cached, len(request.prompt))

    def set_params_version(self, version: int) -> None:
        self._version.set(version)

    def ran(self, kind: str, passes: int) -> None:
        self.passes += passes
        self._passes.labels(kind).inc(passes)

    def compiled(self, seconds: float) -> None:
        self.compile_seconds += seconds
        self._compile.inc(seconds)

    def prefilled(self, tokens: int) -> None:
        self.ran("feed", 1)
        self._tokens.labels("fed").inc(tokens)

    def sampled(self, tokens: int) -> None:
        self.num_sampled += tokens
        self._tokens.labels("sampled").inc(tokens)

    def looked_up(self, replayed: int) -> None:
        self._lookups.labels("hit" if replayed else "miss").inc()
        self._tokens.labels("replayed").inc(replayed)

    def left_alone(self) -> None:
        self._lookups.labels("none wanted").inc()

    def followed(self, tokens: int) -> None:
        self._tokens.labels("followed").inc(tokens)

    def drafted(self, accepted: int, rejected: int) -> None:
        self._drafted.labels("right").inc(accepted)
        self._drafted.labels("wrong").inc(rejected)

    def evicted(self, tokens: int, swapped: int) -> None:
        self._evicted.labels("host").inc(swapped)
        self._evicted.labels("nowhere").inc(tokens - swapped)

    def swapped_in(self, tokens: int) -> None:
        self._fetched.inc(tokens)

    def preempted(self) -> None:
        self._preempted.inc()

    def finished(self, output: Completion) -> None:
        self._finished.labels(str(output.finish_reason)).inc()
        self._seconds.observe(output.seconds)
        if output.first_token_seconds is not None:
            self._first_token.observe(output.first_token_seconds)
            if (later := len(output.tokens) - 1) > 0:
                self._token_seconds.observe((output.seconds - output.first_token_seconds) / later)

    @property
    def contributions(self) -> Mapping[str, float]:
        """The contributions of the active agents, as of the last step."""
        return self._contributions

    def set_contributions(self, contributions: Mapping[str, float]) -> None:
        """Sets the gauges of the active agents' contributions, and drops those of others."""
        if contributions == self._contributions:
            return
        for agent in self._contributions.keys() - contributions.keys():
            self._contribution.remove(agent)
        for agent, share in contributions.items():
            self._contribution.labels(agent).set(share)
        self._contributions = dict(contributions)

    def set_limits(
        self, *, rows: int, accelerator_bytes: int, host_bytes: int, logits_bytes: int
    ) -> None:
        """Sets the gauges of what the engine has, once.

        Args:
          rows: the most requests that run at a time.
          accelerator_bytes, host_bytes, logits_bytes: the capacities for keys and values on the
            accelerator and in host memory, and that of the Logits Cache.
        """
        self._max_rows.set(rows)
        self._bytes_limit.labels("accelerator").set(accelerator_bytes)
        self._bytes_limit.labels("host").set(host_bytes)
        self._bytes_limit.labels("logits").set(logits_bytes)

    def set_state(
        self,
        *,
        decoding: int,
        prefilling: int,
        waiting: int,
        accelerator_bytes: int,
        logits_bytes: int,
        session_bytes: int,
        host_bytes: int,
    ) -> None:
        """Sets the gauges, once a step.

        Args:
          decoding, prefilling, waiting: requests that sample, whose prompts are read, and that are
            in the queue.
          accelerator_bytes, session_bytes, host_bytes: keys and values on the accelerator, those of
            them that are leased to sessions, and those in host memory.
          logits_bytes: of the Logits Cache.
        """
        self._rows.labels("running").set(decoding)
        self._rows.labels("fed").set(prefilling)
        self._queue.set(waiting)
        self._bytes.labels("accelerator").set(accelerator_bytes)
        self._bytes.labels("logits").set(logits_bytes)
        self._bytes.labels("sessions").set(session_bytes)
        self._bytes.labels("host").set(host_bytes)
