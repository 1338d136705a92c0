"""Spans of OpenTelemetry for cells, launches, installs and hibernation.

They nest inside the span that the SDK creates for each call. A cell runs in its session's task,
with the origin of its call and the spans around that. No attribute contains code, values or error
messages. Without a provider they cost next to nothing.
"""

from __future__ import annotations

from contextvars import Token
from dataclasses import replace
from types import TracebackType
from typing import Any

from opentelemetry import context as tracing
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import ProxyTracerProvider, Status, StatusCode

from kernel_mcp.telemetry.origin import HERE, Origin

NAME = "kernel_mcp"
PREFIX = "kernel_mcp."
"""Prefix of attribute names."""


class Span:
    """A span around a block; an exception sets its status, by class name only."""

    __slots__ = ("_attributes", "_name", "_span", "_token")

    def __init__(self, name: str, **attributes: str | int) -> None:
        """`attributes` may include `session`, the session's handle."""
        self._name = name
        self._attributes = attributes
        self._span: trace.Span | None = None
        self._token: Any = None

    def __enter__(self) -> Span:
        provider = trace.get_tracer_provider()
        if not isinstance(provider, ProxyTracerProvider):
            facts = {f"{PREFIX}{name}": value for name, value in self._attributes.items()}
            self._span = provider.get_tracer(NAME).start_span(self._name, attributes=facts)
            self._token = tracing.attach(trace.set_span_in_context(self._span))
        return self

    def note(self, **attributes: str | int) -> None:
        """Add attributes."""
        if self._span is not None:
            for name, value in attributes.items():
                self._span.set_attribute(f"{PREFIX}{name}", value)

    def ended(self, outcome: str, *, well: bool) -> None:
        """Set the outcome, one word; unless `well` the span's status is an error."""
        if self._span is not None:
            self._span.set_attribute(f"{PREFIX}outcome", outcome)
            if not well:
                self._span.set_status(Status(StatusCode.ERROR, outcome))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._span is None:
            return
        if isinstance(error, Exception):
            self.ended(type(error).__name__, well=False)
        elif error is not None:
            self.note(outcome="cancelled")
        tracing.detach(self._token)
        self._span.end()


def caught(session: str, principal: str) -> Origin:
    """Return the current origin with its spans, attributed to a session."""
    trace_ = tracing.get_current()
    return replace(HERE.get(), session=session, principal=principal, trace=trace_)


def of_session(session: str, principal: str) -> Origin:
    """Return the origin of a session's own work, which belongs to no request or span."""
    return Origin(session=session, principal=principal, trace=Context())


class OriginContext:
    """Context in which log lines and spans have an origin; its spans become the parents."""

    __slots__ = ("_attached", "_origin", "_token")

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._token: Token[Origin] | None = None
        self._attached: Any = None

    def __enter__(self) -> None:
        self._token = HERE.set(self._origin)
        if isinstance(self._origin.trace, Context):
            self._attached = tracing.attach(self._origin.trace)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._attached is not None:
            tracing.detach(self._attached)
        if self._token is not None:
            HERE.reset(self._token)
