"""What is under way, for logs and for OpenTelemetry: which stream, which phase, which call, and how long it took.

Logs go to the loggers `lmcache_stream.*`. Spans and metrics are made where the program itself imported OpenTelemetry
(extra `otel`); where it has not, each costs one look for it. There is one span for each phase, request, edit, remote
call and copy, and none for a token. Names are those of OpenTelemetry's conventions for generative AI and for RPC where
there are some, else they begin with `lmcache_stream.`.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lmcache_stream.addresses import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableMapping
    from types import TracebackType
    from typing import Self

    from opentelemetry.metrics import Histogram, MeterProvider
    from opentelemetry.trace import Tracer, TracerProvider

__all__ = ["OFF", "Span", "inject", "request", "rpc", "span", "stream_id", "telemetry", "transfer"]

stream_id: ContextVar[str | None] = ContextVar("lmcache_stream_id", default=None)
"""The stream that the current task works for."""


class Telemetry:
    """OpenTelemetry's tracer, and its instruments by name."""

    def __init__(
        self, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        from opentelemetry import context, metrics, propagate, trace

        self.context = context
        self.propagate = propagate
        self.trace = trace
        self.tracer: Tracer = trace.get_tracer("lmcache_stream", tracer_provider=tracer_provider)
        meter = metrics.get_meter("lmcache_stream", meter_provider=meter_provider)
        self.histograms: dict[str, Histogram] = {
            name: meter.create_histogram(name, unit, description)
            for name, unit, description in (
                ("gen_ai.client.operation.duration", "s", "Duration of a request to the engine."),
                ("gen_ai.client.operation.time_to_first_chunk", "s", "Time to the first token of a request."),
                ("gen_ai.client.token.usage", "{token}", "Tokens of a request."),
                ("rpc.client.call.duration", "s", "Duration of a call of the cache server."),
                ("lmcache_stream.phase.duration", "s", "Duration of a batch's phase."),
                ("lmcache_stream.modify.duration", "s", "Duration of an edit, and of its steps."),
                ("lmcache_stream.modify.io", "By", "KV moved by an edit."),
                ("lmcache_stream.transfer.duration", "s", "Duration of work on a lane."),
            )
        }

    def record(self, name: str, value: float, attributes: Mapping[str, Any]) -> None:
        """Record a value of the histogram `name`."""
        self.histograms[name].record(value, attributes)


_telemetry: Telemetry | None = None


def telemetry() -> Telemetry | None:
    """OpenTelemetry, if the program has imported it."""
    global _telemetry
    if _telemetry is None and "opentelemetry.trace" in sys.modules:
        _telemetry = Telemetry()
    return _telemetry


class Span:
    """Work under way, from its making to `end`. As a context manager it is also the parent of what is begun inside.

    Inside an asynchronous generator nothing that it yields in may be entered: its steps may run in several contexts.

    Args:
        name: Of the span.
        attributes: Known from the start.
        kind: OpenTelemetry's kind of span, such as "CLIENT".
        duration: The histogram that takes its seconds.
        measured: The attributes that go with them; the others tell too much apart.
        logger: Where a debug line tells of it in the end.
        stream: The stream that it is for; None: nothing is said of it.
    """

    __slots__ = (
        "_attached",
        "_attributes",
        "_duration",
        "_logger",
        "_measured",
        "_name",
        "_otel",
        "_span",
        "_start",
        "_stream",
    )

    def __init__(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        *,
        kind: str = "INTERNAL",
        duration: str | None = None,
        measured: tuple[str, ...] = (),
        logger: logging.Logger | None = None,
        stream: str | None = None,
    ) -> None:
        self._name = name
        self._attributes: dict[str, Any] = dict(attributes or {})
        self._duration = duration
        self._measured = measured
        self._logger = logger
        self._stream = stream
        self._start = time.perf_counter()
        self._attached: Any = None
        self._otel = telemetry()
        self._span: Any = None
        if self._otel is not None:
            known = stream or stream_id.get()
            if known is not None:
                self._attributes["lmcache_stream.stream_id"] = known
            self._span = self._otel.tracer.start_span(
                name, kind=getattr(self._otel.trace.SpanKind, kind), attributes=self._attributes
            )

    def __bool__(self) -> bool:
        """Whether anybody wants to know: what costs more than a few attributes is better left out otherwise."""
        return self._otel is not None

    def set(self, attributes: Mapping[str, Any]) -> None:
        """Say more about it; what is None is left out."""
        self._attributes.update({name: value for name, value in attributes.items() if value is not None})

    def record(self, name: str, value: float | None, **more: Any) -> None:
        """Record a value of the histogram `name`, with the same attributes as the duration."""
        if self._otel is not None and value is not None:
            self._otel.record(name, value, self._of_metrics() | more)

    def end(self, error: BaseException | None = None) -> None:
        """Say that it is over, and whether it failed."""
        seconds = time.perf_counter() - self._start
        if error is not None:
            self._attributes["error.type"] = type(error).__qualname__
        if self._logger is not None:
            of = self._stream or stream_id.get()
            outcome = "" if error is None else f", {type(error).__name__}"
            self._logger.debug("%s%s: %.1f ms%s", f"stream {of}: " if of else "", self._name, 1000 * seconds, outcome)
        if self._otel is None:
            return
        self._span.set_attributes(self._attributes)
        if error is not None:
            self._span.set_status(self._otel.trace.StatusCode.ERROR, type(error).__name__)
        self._span.end()
        if self._duration is not None:
            self._otel.record(self._duration, seconds, self._of_metrics())

    def _of_metrics(self) -> dict[str, Any]:
        names = (*self._measured, "error.type")
        return {name: self._attributes[name] for name in names if name in self._attributes}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Make it the parent of what is begun meanwhile, and its stream the one that is logged."""
        of_stream = stream_id.set(self._stream) if self._stream is not None else None
        otel = self._otel
        parent = None if otel is None else otel.context.attach(otel.trace.set_span_in_context(self._span))
        try:
            yield
        finally:
            if otel is not None and parent is not None:
                otel.context.detach(parent)
            if of_stream is not None:
                stream_id.reset(of_stream)

    def __enter__(self) -> Self:
        self._attached = self.attached()
        self._attached.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._attached.__exit__(None, None, None)
        self.end(exc)


class _Off(Span):
    """Work that nobody observes."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    def __bool__(self) -> bool:
        return False

    def set(self, attributes: Mapping[str, Any]) -> None:
        pass

    def record(self, name: str, value: float | None, **more: Any) -> None:
        pass

    def end(self, error: BaseException | None = None) -> None:
        pass

    @contextmanager
    def attached(self) -> Iterator[None]:
        yield

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        pass


OFF = _Off()


def span(name: str, attributes: Mapping[str, Any] | None = None, **options: Any) -> Span:
    """Begin a `Span`; a stream's, or one that somebody observes."""
    if telemetry() is None and options.get("stream") is None:
        return OFF
    return Span(name, attributes, **options)


def request(model: str, params: Mapping[str, Any], phase: str, stream: str) -> Span:
    """Begin the span of a request to an engine."""
    if telemetry() is None:
        return Span(phase, stream=stream)
    asked = {
        f"gen_ai.request.{name}": value
        for name in ("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
        if isinstance(value := params.get(name), int | float)
    }
    return Span(
        f"text_completion {model}",
        {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": model,
            "gen_ai.request.stream": True,
            "lmcache_stream.phase": phase,
            **asked,
        },
        kind="CLIENT",
        duration="gen_ai.client.operation.duration",
        measured=("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "lmcache_stream.phase"),
        stream=stream,
    )


def rpc(method: str, url: str, logger: logging.Logger) -> Span:
    """Begin the span of a remote call of a cache server."""
    if telemetry() is None:
        return Span(method, logger=logger) if logger.isEnabledFor(logging.DEBUG) else OFF
    return Span(
        f"lmcache/{method}",
        {"rpc.system.name": "lmcache", "rpc.method": f"lmcache/{method}", **_server(url)},
        kind="CLIENT",
        duration="rpc.client.call.duration",
        measured=("rpc.system.name", "rpc.method", "server.address", "server.port"),
        logger=logger,
    )


def transfer(fn: Callable[..., Any]) -> Span:
    """Begin the span of `fn` on a lane of a transfer executor, the wait for a free one included."""
    if telemetry() is None:
        return OFF
    name = getattr(fn, "__name__", type(fn).__name__)
    return Span(
        "transfer",
        {"code.function.name": name},
        duration="lmcache_stream.transfer.duration",
        measured=("code.function.name",),
    )


@functools.lru_cache(maxsize=64)
def _server(url: str) -> Mapping[str, Any]:
    parts = urlsplit(url)
    server: dict[str, Any] = {"server.address": parts.hostname or shown(url)}
    if parts.hostname and parts.port:
        server["server.port"] = parts.port
    return server


def inject(headers: MutableMapping[str, str]) -> None:
    """Write the current span into a request's headers, from which an engine can go on."""
    otel = telemetry()
    if otel is not None:
        otel.propagate.inject(headers)
