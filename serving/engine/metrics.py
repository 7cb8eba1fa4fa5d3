"""What the engine counts, for Prometheus. Each engine has a registry of its own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from jaxshare.serving.engine.request import Request, RequestOutput

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The engine's counters.

        from prometheus_client import start_http_server
        start_http_server(9000, registry=engine.metrics.registry)

    Attributes:
      registry: what Prometheus reads.
      passes: forward passes so far, those that feed prompts and those that sample.
      reused: tokens of prompts that were known when their calls were admitted first.
      compile_seconds: that the engine's own thread has compiled so far; sessions on it count
        theirs.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.passes = self.reused = 0
        self.compile_seconds = 0.0
        self._passes = Counter(
            "jaxshare_passes", "Forward passes, by what they do", ["kind"], registry=registry
        )
        self._rows = Gauge(
            "jaxshare_rows", "Calls that are under way", ["state"], registry=registry
        )
        self._queue = Gauge("jaxshare_queue", "Calls that wait", registry=registry)
        self._bytes = Gauge(
            "jaxshare_bytes",
            "Bytes of keys and values by where they are, of what sessions have, and of the Logits "
            "Cache",
            ["tier"],
            registry=registry,
        )
        self._calls = Counter(
            "jaxshare_calls", "Calls that have ended, by how", ["end"], registry=registry
        )
        self._tokens = Counter(
            "jaxshare_tokens",
            "Tokens of calls: read in, sampled, or taken from the Logits Cache",
            ["how"],
            registry=registry,
        )
        self._prompt = Counter(
            "jaxshare_prompt_tokens",
            "Tokens that calls were admitted with",
            ["agent"],
            registry=registry,
        )
        self._reused = Counter(
            "jaxshare_reused_tokens",
            "Of these, those that were known",
            ["agent"],
            registry=registry,
        )
        self._evicted = Counter(
            "jaxshare_evicted_tokens",
            "Tokens that left the accelerator, by where to",
            ["to"],
            registry=registry,
        )
        self._fetched = Counter(
            "jaxshare_fetched_tokens", "Tokens that came back from host memory", registry=registry
        )
        self._lookups = Counter(
            "jaxshare_logits_lookups",
            "Calls that the Logits Cache was asked for",
            ["found"],
            registry=registry,
        )
        self._guesses = Counter(
            "jaxshare_guessed_tokens",
            "Tokens guessed after earlier answers",
            ["were"],
            registry=registry,
        )
        self._preempted = Counter(
            "jaxshare_preemptions", "Calls that had to make way for another", registry=registry
        )
        self._compile = Counter(
            "jaxshare_compile_seconds", "Seconds in which the engine compiled", registry=registry
        )
        self._first = Histogram(
            "jaxshare_first_token_seconds",
            "From a call's submission to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self._whole = Histogram(
            "jaxshare_call_seconds",
            "From a call's submission to its end",
            buckets=_SECONDS,
            registry=registry,
        )

    def admitted(self, call: Request, known: int) -> None:
        self._prompt.labels(call.agent).inc(len(call.tokens))
        self._reused.labels(call.agent).inc(known)
        if not call.preemptions:
            self.reused += min(known, len(call.prompt))

    def ran(self, kind: str, passes: int) -> None:
        self.passes += passes
        self._passes.labels(kind).inc(passes)

    def compiled(self, seconds: float) -> None:
        self.compile_seconds += seconds
        self._compile.inc(seconds)

    def fed(self, tokens: int) -> None:
        self.ran("feed", 1)
        self._tokens.labels("fed").inc(tokens)

    def sampled(self, tokens: int) -> None:
        self._tokens.labels("sampled").inc(tokens)

    def looked_up(self, replayed: int) -> None:
        self._lookups.labels("hit" if replayed else "miss").inc()
        self._tokens.labels("replayed").inc(replayed)

    def guessed(self, right: int, wrong: int) -> None:
        self._guesses.labels("right").inc(right)
        self._guesses.labels("wrong").inc(wrong)

    def evicted(self, tokens: int, swapped: int) -> None:
        self._evicted.labels("host").inc(swapped)
        self._evicted.labels("nowhere").inc(tokens - swapped)

    def fetched(self, tokens: int) -> None:
        self._fetched.inc(tokens)

    def preempted(self) -> None:
        self._preempted.inc()

    def finished(self, call: Request, done: RequestOutput) -> None:
        self._calls.labels(done.end.value).inc()
        self._whole.observe(done.seconds)
        if done.first_token_seconds is not None:
            self._first.observe(done.first_token_seconds)

    def look(
        self,
        *,
        running: int,
        fed: int,
        waiting: int,
        accelerator_bytes: int,
        logits_bytes: int,
        session_bytes: int,
        host_bytes: int,
    ) -> None:
        """Once a round: what there is now.

        Args:
          running, fed, waiting: calls that sample, whose prompts are read, and in the queue.
          accelerator_bytes, session_bytes, host_bytes: of keys and values on the accelerator, in
            what sessions have of it, and in host memory.
          logits_bytes: of the Logits Cache.
        """
        self._rows.labels("running").set(running)
        self._rows.labels("fed").set(fed)
        self._queue.set(waiting)
        self._bytes.labels("accelerator").set(accelerator_bytes)
        self._bytes.labels("logits").set(logits_bytes)
        self._bytes.labels("sessions").set(session_bytes)
        self._bytes.labels("host").set(host_bytes)
