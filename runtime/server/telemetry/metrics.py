"""ServerMetrics: what Prometheus and routers are told, under vLLM 0.33's names."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from trt_lora.runtime.server.admission import Admission
from trt_lora.runtime.server.engine_process.engine_client import EngineClient
from trt_lora.runtime.server.engine_process.step_meter import SECONDS, STEP_TOKENS
from trt_lora.runtime.server.telemetry.answer_end import AnswerEnd
from trt_lora.runtime.server.telemetry.buckets import ANSWERS, BETWEEN, FIRST, WHOLE, up_to
from trt_lora.runtime.server.telemetry.families import Families

_LABELS = ("model_name", "engine")
_REASONS = ("stop", "length", "abort", "error")  # vLLM's; the series are there from the start
# Tokens, vLLM's default: a row of ours has no blocks, but routers cut prompts into such.
_BLOCK = 16


@dataclass(frozen=True)
class Cache:
    """What the engine keeps of prompts and answers."""

    row_tokens: int  # of each row
    most_tokens: int  # that a prompt and its answer may have
    shares_prefixes: bool


class ServerMetrics:
    """A registry of its own: two servers in a process do not share a series.

    What belongs to steps is counted in the engine's process, and is asked for when a router asks:
    of each token nothing is noted here.
    """

    def __init__(
        self, client: EngineClient, admission: Admission, model: str, cache: Cache
    ) -> None:
        """Begin at zero."""
        self._client, self._admission, self._cache = client, admission, cache
        self._model, self._families = model, Families(model)
        self._adapters: Mapping[str, Any] = {}  # as the engine's process has told
        self._steps: Mapping[str, Any] = {}
        self._registry = CollectorRegistry()
        prompt = Counter("vllm:prompt_tokens", "Of prompts", _LABELS, registry=self._registry)
        self._prompt = prompt.labels(model, "0")
        labels, text = (*_LABELS, "finished_reason"), "Answers that have ended"
        ended = Counter("vllm:request_success", text, labels, registry=self._registry)
        self._ended = {reason: ended.labels(model, "0", reason) for reason in _REASONS}
        histogram, tokens = self._histogram, up_to(cache.most_tokens)
        text = "To the first token"
        self._first = histogram("vllm:time_to_first_token_seconds", text, FIRST)
        self._answers = histogram("vllm:request_params_n", "Answers to a prompt", ANSWERS)
        text = "That requests with an adapter waited for it"
        self._adapter_wait = histogram("trt_lora:adapter_wait_seconds", text, FIRST)
        self._of_ends = {
            name: histogram(f"vllm:{name}", text, buckets)
            for name, text, buckets in (
                ("e2e_request_latency_seconds", "Whole answers", WHOLE),
                ("request_queue_time_seconds", "Until they had a row", WHOLE),
                ("request_prefill_time_seconds", "From then to the first token", WHOLE),
                ("request_decode_time_seconds", "From then to the last", WHOLE),
                ("request_inference_time_seconds", "In a row", WHOLE),
                ("request_time_per_output_token_seconds", "Mean of an answer", BETWEEN),
                ("request_prompt_tokens", "Of its prompt", tokens),
                ("request_generation_tokens", "Of an answer", tokens),
                ("request_params_max_tokens", "It might have had", tokens),
            )
        }
        self._registry.register(self)

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        """Note that an answer begins."""
        self._first.observe(seconds)
        self._prompt.inc(prompt_tokens)

    def ended(self, ends: Sequence[AnswerEnd], answers: int, *, uses_adapter: bool) -> None:
        """Note that the answers to a request have ended, so many to each prompt."""
        for end in ends:
            self._ended[end.reason].inc()
            if uses_adapter and end.times is not None:
                self._adapter_wait.observe(end.times.load_s)
            if end.is_whole:
                for name, value in end.facts().items():
                    self._of_ends[name].observe(value)
        if all(end.is_whole for end in ends):
            for _ in ends[::answers]:
                self._answers.observe(answers)

    async def text(self) -> bytes:
        """Return the exposition; the engine is asked for its adapters and steps."""
        ask = self._client.ask
        self._adapters, self._steps = await asyncio.gather(ask("stats"), ask("steps"))
        return generate_latest(self._registry)

    def load(self) -> dict[str, float]:
        """Return how full the engine is, as ORCA reports name it."""
        return {
            "kv_cache_usage_perc": self._client.running / max(self._client.rows, 1),
            "num_requests_waiting": float(self._client.queued),
        }

    def collect(self) -> Iterator[Metric]:
        """Yield what is true now; prometheus_client calls it."""
        client, families, adapters = self._client, self._families, self._adapters
        usage = self.load()["kv_cache_usage_perc"]
        yield families.gauge("vllm:num_requests_running", "Requests in rows", client.running)
        yield families.gauge("vllm:num_requests_waiting", "Requests without one", client.queued)
        yield families.gauge("vllm:kv_cache_usage_perc", "Part of the rows in use", usage)
        yield self._cache_info()
        yield self._lora_info()
        name, text = "trt_lora:adapters", "Adapters by where they lie"
        yield families.gauges(name, text, adapters["levels"], "level")
        name, text = "trt_lora:adapter_loads", "Loads into memory and into slots"
        yield families.counters(name, text, adapters["loads"], "level")
        name, text = "vllm:admission_rejections", "Requests refused"
        yield families.counters(name, text, self._admission.rejections, "reason")
        yield from self._counts_of_steps()
        yield from self._times_of_steps()

    def _counts_of_steps(self) -> Iterator[Metric]:
        for name, text, key in (
            ("generation_tokens", "Of answers", "given"),
            ("prefix_cache_queries", "Tokens of prompts that were looked up", "asked"),
            ("prefix_cache_hits", "Tokens of those that were not run", "shared"),
            ("num_preemptions", "Times that a request has lost its row", "preempted"),
        ):
            yield self._families.counter(f"vllm:{name}", text, self._steps[key])

    def _times_of_steps(self) -> Iterator[Metric]:
        made, steps = self._families.histograms, self._steps
        gaps, text = {"": steps["gaps"]}, "Between two tokens of a row"
        yield made("vllm:inter_token_latency_seconds", text, gaps, SECONDS, told=BETWEEN)
        yield made("trt_lora:step_gap_seconds", text, gaps, SECONDS)
        name, text = "trt_lora:step_seconds", "Steps, by what they ran"
        yield made(name, text, steps["steps"], SECONDS, label="kind")
        name, text = "vllm:iteration_tokens_total", "Of prompts and answers, in a step"
        yield made(name, text, {"": steps["step_tokens"]}, STEP_TOKENS)

    def _lora_info(self) -> Metric:
        """One series, whatever adapters there are: the newest labels alone."""
        running = self._adapters["resident"]
        gauge = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters in slots, and those wanted that are not there",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        waiting = self._client.waiting_adapters.difference(running)
        labels = (str(self._adapters["slots"]), ",".join(running), ",".join(sorted(waiting)))
        gauge.add_metric(labels, time.time())
        return gauge

    def _cache_info(self) -> Metric:
        """How many tokens there is room for: block_size times num_gpu_blocks."""
        labels = {
            "block_size": str(_BLOCK),
            "num_gpu_blocks": str(self._client.rows * self._cache.row_tokens // _BLOCK),
            "enable_prefix_caching": str(self._cache.shares_prefixes),
            "engine": "0",
        }
        gauge = GaugeMetricFamily("vllm:cache_config_info", "The cache", labels=list(labels))
        gauge.add_metric(list(labels.values()), 1)
        return gauge

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(name, text, _LABELS, registry=self._registry, buckets=buckets)
        return made.labels(self._model, "0")
