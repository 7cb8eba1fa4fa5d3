"""OpenTelemetry traces of requests: how long each waits, is prefilled and is decoded.

They take the extra `otel`. Nothing of it is imported unless a tracer is made.
"""

import functools
import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self
from urllib.parse import urlsplit

from jaxshare import Sampler, __version__
from jaxshare.argument_checks import shown
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.engine.request import Request

log = logging.getLogger("jaxshare.engine")

OPERATION = "jaxshare-operation"
"""The key under which a context of OpenTelemetry has the name of the operation that a request is of."""
_PATH = "/v1/traces"
_PROTOCOL = "http/protobuf"
_PROVIDER = "jaxshare"
_BEFORE = "OTEL_EXPORTER_OTLP_"


class RequestTracer:
    """Makes a span of each request of an engine, with a span of each of its parts in it.

        engine.tracer = RequestTracer(opentelemetry.trace.get_tracer("app"), "qwen3")

    A request's span begins with its submission, within the span that is current there. Its parts are
    `queue`, until a row and memory are found for it; `prefill`, until its first token is handed out;
    and `decode`. Attributes are those of OpenTelemetry's semantic conventions for generative AI.
    Spans have neither prompts nor answers.

    Args:
      tracer: of OpenTelemetry.
      model: the name of the model in spans.
      close: sends what is left.

    Attributes:
      tracer: as given.
    """

    def __init__(self, tracer: Any, model: str, close: Callable[[], None] = lambda: None):
        self.tracer, self._model, self._close = tracer, model, close

    @classmethod
    def exporting(cls, endpoint: str, model: str) -> Self:
        """Makes a tracer that sends spans to a collector, in the background.

        Args:
          endpoint: the address to which OTLP sends traces by HTTP, such as
            http://localhost:4318/v1/traces.
          model: see the class.

        Raises:
          ValueError: the extra is not installed.
        """
        check_installed()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        own = {"service.name": "jaxshare", "service.version": __version__}
        resource = Resource.create(own).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider.get_tracer("jaxshare", __version__), model, provider.shutdown)

    def close(self) -> None:
        """Sends the spans that are left, and ends."""
        self._close()

    def begin(self, request: Request) -> Callable[[Completion], None]:
        """Begins to watch a request that is submitted now.

        Returns:
          What is to be called with its output, in any thread.
        """
        from opentelemetry import context

        return functools.partial(self._end, request, context.get_current(), time.time_ns())

    def _end(self, request: Request, parent: Any, begin: int, output: Completion) -> None:
        """Makes the spans of a request that has ended."""
        try:
            self._make_spans(request, parent, begin, output)
        except Exception:  # a span is not worth a request, nor the engine
            log.exception("a request could not be traced")

    def _make_spans(self, request: Request, parent: Any, begin: int, output: Completion) -> None:
        from opentelemetry import context, trace

        operation = context.get_value(OPERATION, parent) or "text_completion"
        span = self.tracer.start_span(
            f"{operation} {self._model}",
            parent,
            start_time=begin,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": _PROVIDER,
                "gen_ai.request.model": self._model,
                **_request_attributes(request),
                **_output_attributes(output),
            },
        )
        within = trace.set_span_in_context(span, parent)
        for name, start, end in _parts(output) if span.is_recording() else ():
            part = self.tracer.start_span(name, within, start_time=begin + _nanoseconds(start))
            part.end(begin + _nanoseconds(end))
        if output.error is not None:
            span.set_attribute("error.type", type(output.error).__qualname__)
            span.set_status(trace.StatusCode.ERROR)
        span.end(begin + _nanoseconds(output.seconds))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _request_attributes(request: Request) -> dict[str, Any]:
    sampler, none = request.sampler, Sampler()
    told = {
        "gen_ai.request.max_tokens": request.max_new_tokens,
        "gen_ai.request.temperature": float(sampler.temperature),
        "jaxshare.request.number": request.number,
        "jaxshare.request.priority": request.priority,
    }
    for name in ("top_k", "top_p", "presence_penalty", "frequency_penalty"):
        if (value := getattr(sampler, name)) != getattr(none, name):
            told[f"gen_ai.request.{name}"] = value
    if request.given_seed is not None:
        told["gen_ai.request.seed"] = request.given_seed
    if request.agent:
        told["gen_ai.agent.id"] = request.agent
    return told


def _output_attributes(output: Completion) -> dict[str, Any]:
    return {
        "gen_ai.response.finish_reasons": (str(output.finish_reason),),
        "gen_ai.usage.input_tokens": output.prompt_tokens,
        "gen_ai.usage.output_tokens": len(output.tokens),
        "gen_ai.usage.cache_read.input_tokens": output.reused_tokens,
        "jaxshare.usage.replayed_tokens": output.replayed_tokens,
        "jaxshare.preemptions": output.preemptions,
    }


def _parts(output: Completion) -> Iterator[tuple[str, float, float]]:
    """The parts of a request: name, start and end in seconds from its submission."""
    first, end = output.first_token_seconds, output.seconds
    admitted = output.queue_seconds
    if admitted is None:  # it was cancelled, or all of it came out of the Logits Cache
        yield "queue", 0.0, end if first is None else first
    else:
        yield "queue", 0.0, admitted
        yield "prefill", admitted, max(admitted, end if first is None else first)
    if first is not None:
        yield "decode", max(first, admitted or 0.0), end


def check_installed() -> None:
    """Raises ValueError where the extra `otel` is not installed."""
    try:
        is_there = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise ValueError(
            "traces need opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http, which are "
            "not installed; run pip install 'jaxshare[otel]'"
        )


def endpoint_of(given: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the address that traces are sent to; None where requests are not to be traced.

    Args:
      given: the address of a collector; None for that of the environment.
      environment: variables, of which OpenTelemetry's standard ones are read.

    Raises:
      ValueError: an address that is none, or a protocol other than HTTP with protobuf.
    """
    own = environment.get(f"{_BEFORE}TRACES_ENDPOINT")
    url = given or own or environment.get(f"{_BEFORE}ENDPOINT")
    is_off = environment.get("OTEL_TRACES_EXPORTER") == "none" and given is None
    if not url or is_off or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        is_url = False
    if not is_url:
        raise ValueError(
            f"the address of the collector of traces is {shown(url)}; give one such as "
            "http://localhost:4318"
        )
    for name in (f"{_BEFORE}TRACES_PROTOCOL", f"{_BEFORE}PROTOCOL"):
        if (protocol := environment.get(name) or _PROTOCOL) != _PROTOCOL:
            raise ValueError(
                f"{name} is {shown(protocol)}, but traces are sent by {_PROTOCOL}; set that, and "
                "the port of the collector for HTTP, such as 4318"
            )
        if environment.get(name):
            break
    as_is = url == own and not given
    return url if as_is or url.endswith(_PATH) else url.rstrip("/") + _PATH
