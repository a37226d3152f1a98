"""Prometheus metrics, in a registry of their own."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ..request import StepOutput
from .engine_api import ServedEngine

OUTCOMES = ("stop", "length", "abort", "error")
LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """`model` labels hold names that the server answers to (base or adapter), so clients cannot make new series."""

    def __init__(self, engine: ServedEngine):
        self.registry = reg = CollectorRegistry()
        both, model = ["model", "outcome"], ["model"]
        first, total = "lora_jax_time_to_first_token_seconds", "lora_jax_request_seconds"
        self.finished = Counter("lora_jax_requests", "Prompts by how they ended", both, registry=reg)
        self.prompt_tokens = Counter("lora_jax_prompt_tokens", "Prompt tokens", model, registry=reg)
        self.generation_tokens = Counter("lora_jax_generation_tokens", "Generated tokens", model, registry=reg)
        self.open = Gauge("lora_jax_open_requests", "Prompts in work or waiting", model, registry=reg)
        self.first = Histogram(first, "From arrival to first token", model, buckets=LATENCIES, registry=reg)
        self.total = Histogram(total, "From arrival to end", model, buckets=LATENCIES, registry=reg)
        self.registry.register(_EngineStats(engine))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def track(self, model: str, prompt_tokens: int) -> Tracker:
        self.prompt_tokens.labels(model).inc(prompt_tokens)
        tracker = Tracker(self, model)
        tracker.open.inc()
        return tracker

    def forget(self, model: str) -> None:
        """Drops an unloaded adapter's series, so that loads and unloads for ever don't add up."""
        for metric in (self.prompt_tokens, self.generation_tokens, self.open, self.first, self.total):
            with suppress(KeyError):  # never used
                metric.remove(model)
        for outcome in OUTCOMES:
            with suppress(KeyError):
                self.finished.remove(model, outcome)


class Tracker:
    """One prompt's life; `end` counts it once."""

    def __init__(self, metrics: Metrics, model: str):
        # The series are looked up now: after `forget` they must not come back for a request that is still running.
        self.open = metrics.open.labels(model)
        self.tokens = metrics.generation_tokens.labels(model)
        self.first, self.total = metrics.first.labels(model), metrics.total.labels(model)
        self.finished = {outcome: metrics.finished.labels(model, outcome) for outcome in OUTCOMES}
        self.arrival = time.monotonic()
        self.first_seen = self.ended = False

    def add(self, output: StepOutput) -> None:
        if output.token_ids:
            self.tokens.inc(len(output.token_ids))
            if not self.first_seen:
                self.first_seen = True
                self.first.observe(time.monotonic() - self.arrival)
        if output.error is not None or output.finish_reason is not None:
            self.end(output.finish_reason or "error")

    def end(self, outcome: str) -> None:
        if not self.ended:
            self.ended = True
            self.open.dec()
            self.finished[outcome].inc()
            self.total.observe(time.monotonic() - self.arrival)


class _EngineStats(Collector):
    """Every number of `engine.stats()` as a gauge; a dictionary of numbers as one gauge with the label `name`."""

    def __init__(self, engine: ServedEngine):
        self.engine = engine

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return []  # so that registering does not ask the engine

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for key, value in self.engine.stats().items():
            name = f"lora_jax_engine_{key}"
            if isinstance(value, (int, float)):
                yield GaugeMetricFamily(name, f"Engine: {key.replace('_', ' ')}", value=float(value))
            elif isinstance(value, dict):
                family = GaugeMetricFamily(name, f"Engine: {key.replace('_', ' ')}", labels=["name"])
                for label, number in value.items():
                    if isinstance(number, (int, float)):
                        family.add_metric([str(label)], float(number))
                yield family
