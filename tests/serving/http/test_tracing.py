"""Traces of requests: over HTTP within a client's trace, of the library, and sent to a collector."""

import contextlib
import http.server
import importlib.util
import subprocess
import sys
import threading
import time

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from jaxshare import Sampler
from jaxshare.serving.cli import main
from jaxshare.serving.engine import RequestTracer, TooLongError, tracing
from jaxshare.serving.engine.tracing import check_installed, endpoint_of
from tests.serving.http.replicas.test_front import ScriptedReplicas, fronted
from tests.serving.http.served import ScriptedEngine, served, until

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
MOST = "gen_ai.request.max_tokens"
PARTS = ["queue", "prefill", "decode"]


class Kept:
    """Spans that are kept in memory, and a tracer that makes them."""

    def __init__(self):
        self._exporter, self._provider = InMemorySpanExporter(), TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = RequestTracer(self._provider.get_tracer("tests"), "tiny")

    def named(self, name, count=1):
        """The spans of a name, when there are as many."""

        def found():
            return [span for span in self._exporter.get_finished_spans() if span.name == name]

        until(lambda: len(found()) >= count)
        assert len(found()) == count
        return found()

    @property
    def names(self):
        return [span.name for span in self._exporter.get_finished_spans()]

    def of(self, span):
        """The spans within another, in the order of their starts."""
        every = self._exporter.get_finished_spans()
        within = [one for one in every if one.parent and one.parent.span_id == ids(span)[1]]
        return sorted(within, key=lambda one: (one.start_time, one.end_time))


def reason_of(span):
    (reason,) = span.attributes["gen_ai.response.finish_reasons"]
    return reason


def ids(span):
    return span.context.trace_id, span.context.span_id


@pytest.fixture
def kept():
    return Kept()


@pytest.fixture
def traced(engine, kept):
    """The engine of all tests, with a tracer as long as this test lasts."""
    engine.tracer = kept.tracer
    yield engine
    engine.tracer = None


def test_a_request_has_its_parts_and_what_the_output_tells(traced, kept):
    """The parts follow each other without a gap; their times are those of the output."""
    before = time.time_ns()
    with kept.tracer.tracer.start_as_current_span("mine") as mine:
        sampler = Sampler(temperature=0.5, top_k=7)
        stream = traced.submit(
            [3, 4, 5, 6], sampler, max_new_tokens=6, seed=11, agent_id="maths", stop="never"
        )
        output = stream.wait()
    (span,) = kept.named("text_completion tiny")
    assert span.parent.span_id == mine.get_span_context().span_id
    parts = kept.of(span)
    assert [part.name for part in parts] == PARTS
    times = [span.start_time, *(part.end_time for part in parts)]
    assert [part.start_time for part in parts] == times[:-1] and times[-1] == span.end_time
    told = [output.queue_seconds, output.first_token_seconds, output.seconds]
    assert told == sorted(told)
    assert [(end - times[0]) / 1e9 for end in times[1:]] == pytest.approx(told, abs=1e-6)
    assert before <= span.start_time <= span.end_time <= time.time_ns()
    found = dict(span.attributes)
    assert found.pop("jaxshare.request.number") >= 0
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "jaxshare",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 11,
        "gen_ai.agent.id": "maths",
        "gen_ai.response.finish_reasons": (str(output.finish_reason),),
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": len(output.tokens),
        "gen_ai.usage.cache_read.input_tokens": output.reused_tokens,
        "jaxshare.usage.replayed_tokens": 0,
        "jaxshare.preemptions": 0,
        "jaxshare.request.priority": 0,
    }


def test_a_request_that_waits_for_a_row_is_in_the_queue_until_another_ends(traced, kept):
    """The engine has four rows; the fifth request, which would be short, begins after one of four."""
    long = [traced.submit([9, i + 3], max_new_tokens=40, seed=i) for i in range(4)]
    fifth = traced.submit([9, 9, 9], max_new_tokens=1, seed=9)
    cancelled = traced.submit([9, 9, 8], max_new_tokens=1, seed=9)
    cancelled.cancel()
    for stream in [*long, fifth]:
        stream.wait()
    assert cancelled.wait().queue_seconds is None
    spans = kept.named("text_completion tiny", 6)
    (gone,) = [span for span in spans if reason_of(span) == "cancelled"]
    assert [part.name for part in kept.of(gone)] == ["queue"]
    ends = [span.end_time for span in spans if span.attributes[MOST] == 40]
    (short,) = [span for span in spans if span.attributes[MOST] == 1 and span is not gone]
    assert len(ends) == 4 and kept.of(short)[0].end_time >= min(ends)


def test_a_request_that_is_refused_has_no_span(traced, kept):
    with pytest.raises(TooLongError):
        traced.submit([3] * 10, max_new_tokens=10**6)
    traced.submit([3, 4], max_new_tokens=1).wait()
    kept.named("text_completion tiny")


def test_a_tracer_that_fails_costs_no_request(traced, kept, monkeypatch, caplog):
    monkeypatch.setattr(kept.tracer.tracer, "start_span", lambda *_, **__: 1 / 0)
    assert len(traced.submit([3, 4], Sampler(ignore_eos=True), max_new_tokens=2).wait().tokens) == 2
    until(lambda: "a request could not be traced" in caplog.messages)
    assert len(traced.submit([3, 4], Sampler(ignore_eos=True), max_new_tokens=2).wait().tokens) == 2


@pytest.mark.parametrize(
    ("path", "body", "operation", "count"),
    [
        (COMPLETIONS, {"prompt": "secret words", "n": 2}, "text_completion", 2),
        (CHATS, {"messages": [{"role": "user", "content": "secret words"}]}, "chat", 1),
        (COMPLETIONS, {"prompt": "secret words", "stream": True}, "text_completion", 1),
    ],
)
def test_a_request_continues_the_client_s_trace(traced, kept, path, body, operation, count):
    more = {"max_tokens": 3, "stop": ["secret stop"], "user": "secret user"}
    with served(traced) as made:
        answer = made.post(path, body | more, headers=TRACEPARENT)
        assert answer.status_code == 200
        assert made.http.get("/ready").status_code in (200, 503)
    (span,) = kept.named(f"POST {path}")
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
    assert span.kind is trace.SpanKind.SERVER
    assert dict(span.attributes) == {
        "http.request.method": "POST",
        "http.route": path,
        "url.path": path,
        "url.scheme": "http",
        "http.response.status_code": 200,
        "http.response.header.x-request-id": (answer.headers["x-request-id"],),
    }
    requests = kept.of(span)
    assert [one.name for one in requests] == [f"{operation} tiny"] * count
    for one in requests:
        assert one.attributes["gen_ai.operation.name"] == operation
        assert [part.name for part in kept.of(one)] in (PARTS, PARTS[:2])
        assert span.start_time <= one.start_time <= one.end_time <= span.end_time
    assert len(kept.names) == 1 + count + sum(len(kept.of(one)) for one in requests)  # no probes
    assert "secret" not in "".join(each.to_json() for each in [span, *requests])


def test_errors_are_told_without_the_words_of_a_client(kept):
    engine = ScriptedEngine(answers=["Yes."])
    engine.tracer = kept.tracer
    with served(engine) as made:
        assert made.http.request("BREW", "/secret/path").status_code == 404
        assert made.post(COMPLETIONS, {"prompt": "", "max_tokens": "secret"}).status_code == 400
        engine.broken = RuntimeError("secret failure")
        assert made.post(COMPLETIONS, {"prompt": "a"}).status_code == 500
    other, refused, broken = kept.named("_OTHER") + kept.named(f"POST {COMPLETIONS}", 2)
    assert other.attributes["http.response.status_code"] == 404
    assert "http.route" not in other.attributes
    assert refused.attributes["http.response.status_code"] == 400 and refused.status.is_unset
    assert broken.attributes["error.type"] == "500" and not broken.status.is_ok
    assert broken.status.status_code is trace.StatusCode.ERROR
    assert "secret" not in "".join(each.to_json() for each in (other, refused, broken))


class NotingEngine(ScriptedEngine):
    """An engine that notes the trace that each request is submitted in."""

    def submit(self, *args, **options):
        self.seen = trace.get_current_span().get_span_context()
        return super().submit(*args, **options)


def test_a_replica_continues_the_trace(kept):
    replicas = ScriptedReplicas("one")
    with fronted(replicas, tracer=kept.tracer) as (client, _, _):
        service = replicas.services["one"]
        service.engine, service.tracer = NotingEngine(answers=["Yes."]), kept.tracer
        body = {"prompt": "a", "max_tokens": 4}
        assert client.post(COMPLETIONS, json=body, headers=TRACEPARENT).status_code == 200
    (span,) = kept.named(f"POST {COMPLETIONS}")
    assert f"{span.context.trace_id:032x}" == TRACE
    assert (service.engine.seen.trace_id, service.engine.seen.span_id) == ids(span)


@contextlib.contextmanager
def collector():
    """A collector of traces: its address, and the requests that come."""
    came = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            came.append((self.path, self.headers["content-encoding"], body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", came
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def test_spans_reach_a_collector_with_the_name_of_the_service(engine, monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=tests")
    with collector() as (url, came):
        engine.tracer = tracer = RequestTracer.exporting(endpoint_of(url, {}), "tiny")
        try:
            engine.submit([3, 4, 5], max_new_tokens=2).wait()
            engine.drain(20)
        finally:
            engine.tracer = None
        tracer.close()
    ((path, encoding, body),) = came
    assert path == "/v1/traces" and encoding is None
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    told = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert told["service.name"] == "jaxshare" and told["service.version"]
    assert told["deployment.environment.name"] == "tests"
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert {"text_completion tiny", "queue", "prefill"} <= {*names}


ENDPOINT, OWN = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
URL = "http://collector:4318"


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        (None, {}, None),
        (URL, {}, f"{URL}/v1/traces"),
        (f"{URL}/", {}, f"{URL}/v1/traces"),
        (f"{URL}/v1/traces", {}, f"{URL}/v1/traces"),
        (URL, {ENDPOINT: "http://other:1"}, f"{URL}/v1/traces"),
        (None, {ENDPOINT: URL}, f"{URL}/v1/traces"),
        (None, {OWN: f"{URL}/my/path", ENDPOINT: "http://other:1"}, f"{URL}/my/path"),
        (None, {ENDPOINT: URL, "OTEL_TRACES_EXPORTER": "none"}, None),
        (URL, {"OTEL_TRACES_EXPORTER": "none"}, f"{URL}/v1/traces"),
        (URL, {"OTEL_SDK_DISABLED": "TRUE"}, None),
        (
            URL,
            {
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            },
            f"{URL}/v1/traces",
        ),
    ],
)
def test_the_address_of_the_collector(given, environment, expected):
    assert endpoint_of(given, environment) == expected


@pytest.mark.parametrize(
    ("given", "environment", "told"),
    [
        ("collector:4318", {}, "collector of traces is 'collector:4318'; give one such as http://"),
        ("ftp://collector", {}, "'ftp://collector'"),
        ("http://", {}, "'http://'"),
        ("http://collector:port", {}, "'http://collector:port'"),
        (
            URL,
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc', but",
        ),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(given, environment, told):
    with pytest.raises(ValueError, match=r".") as error:
        endpoint_of(given, environment)
    assert told in str(error.value)


def test_the_extra_that_is_missing_is_named(monkeypatch, capsys):
    """Before a model is loaded. The environment may be meant for others: it is a warning then."""
    check_installed()
    found = importlib.util.find_spec

    def without(name, *package):
        return None if name.startswith("opentelemetry") else found(name, *package)

    monkeypatch.setattr(tracing.importlib.util, "find_spec", without)
    with pytest.raises(ValueError, match=r"pip install 'jaxshare\[otel\]'"):
        check_installed()
    assert main.main(["serve", "no-such-folder", "--otlp-endpoint", URL]) == 1
    assert "pip install 'jaxshare[otel]'" in capsys.readouterr().err
    monkeypatch.setenv(ENDPOINT, URL)
    assert main.main(["serve", "/no-such-folder", "--port", "0"]) == 1
    error = capsys.readouterr().err
    assert "warning: requests are not traced" in error and "no-such-folder" in error


@pytest.mark.slow
def test_a_server_that_does_not_trace_imports_neither_sdk_nor_exporter():
    """The interface, opentelemetry-api, is imported by FastAPI."""
    program = (
        "import sys, jaxshare.serving.http.server, jaxshare.serving.engine\n"
        "parts = ('opentelemetry.sdk', 'opentelemetry.exporter')\n"
        "print([name for name in sys.modules if name.startswith(parts)])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
