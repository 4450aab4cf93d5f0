"""OpenTelemetry: a trace of each request, from its arrival over HTTP to its last token.

    POST /v1/completions            the request over HTTP, in the caller's trace if it names one
      text_completion MODEL         each request to the engine, with `gen_ai` attributes
        queue                       until it was admitted
        prefill                     until its first token
        decode                      until its end

All spans are made from times that were taken anyway, once the answer has been sent: until then
tracing costs nothing. Only a server that was told to imports this, and with it OpenTelemetry.
"""

from __future__ import annotations

import time

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import radixkv
from radixkv.engine import RequestOutput
from radixkv.server.answer import Answer
from radixkv.server.record import Record

TRACES = "/v1/traces"


class Tracing:
    """Makes and exports the spans; a reporter of records.

    Parameters
    ----------
    model_name : str
    exporter : SpanExporter
        Where they go; from a thread of its own.
    """

    def __init__(self, model_name: str, exporter: SpanExporter) -> None:
        self._model = model_name
        resource = Resource.create(
            {"service.name": "radixkv", "service.version": radixkv.__version__}
        )
        # Not the global provider: two services in one process keep apart.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("radixkv", radixkv.__version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, model_name: str, endpoint: str | None) -> Tracing:
        """Export over OTLP and HTTP to a collector.

        Parameters
        ----------
        model_name : str
        endpoint : str, optional
            Its URL, with or without ``/v1/traces``; what OpenTelemetry's environment variables say
            unless given.
        """
        if endpoint is not None and not endpoint.endswith(TRACES):
            endpoint = endpoint.rstrip("/") + TRACES
        return cls(model_name, OTLPSpanExporter(endpoint=endpoint))

    def report(self, record: Record) -> None:
        """Make the spans of a request that has been answered."""
        # Times were taken by a clock without an epoch.
        epoch = time.time_ns() - time.perf_counter_ns()
        span = self._tracer.start_span(
            f"{record.method} {record.route}",
            self._propagator.extract(record.trace),
            SpanKind.SERVER,
            {
                "http.request.method": record.method,
                "http.route": record.route,
                "http.response.status_code": record.status,
                "url.path": record.path,
                "radixkv.request_id": record.request_id,
            },
            start_time=epoch + _ns(record.began),
        )
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span)
        operation = "chat" if "chat" in record.route else "text_completion"
        for answer in record.answers:
            if answer.output is not None:
                self._trace_answer(answer, answer.output, operation, inside, epoch)
        span.end(epoch + _ns(record.ended))

    def _trace_answer(
        self, answer: Answer, output: RequestOutput, operation: str, inside: Context, epoch: int
    ) -> None:
        arrived = epoch + _ns(answer.arrived_at)
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            inside,
            SpanKind.INTERNAL,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "radixkv",
                "gen_ai.request.model": self._model,
                "gen_ai.request.choice.count": len(output.outputs),
                "gen_ai.response.id": output.request_id,
                "gen_ai.response.finish_reasons": [
                    str(completion.finish_reason) for completion in output.outputs
                ],
                "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
                "gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens,
                "gen_ai.usage.output_tokens": sum(
                    len(completion.token_ids) for completion in output.outputs
                ),
                "radixkv.preemptions": output.num_preemptions,
            },
            start_time=arrived,
        )
        if output.error is not None:
            span.set_status(Status(StatusCode.ERROR, str(output.error)))
        within = set_span_in_context(span)
        begin = 0.0
        for name, end in (
            ("queue", output.time_in_queue),
            ("prefill", output.time_to_first_token),
            ("decode", output.total_time),
        ):
            if end is None:
                break
            phase = self._tracer.start_span(name, within, start_time=arrived + _ns(begin))
            phase.end(arrived + _ns(end))
            begin = end
        span.end(arrived + _ns(output.total_time or begin))

    def close(self) -> None:
        """Export what is left, and end."""
        self._provider.shutdown()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
