"""AnswerEnd: what is known of an answer when it ends."""

from dataclasses import dataclass

from trt_lora.runtime.server.engine_process.wire import RequestTimes


@dataclass(frozen=True)
class AnswerEnd:
    """One answer of a request."""

    reason: str  # stop or length; abort where it was let go before, error where it failed
    total_s: float  # since the request came
    first_s: float | None  # since then too, to its first token
    prompt_tokens: int
    tokens: int  # that it had
    max_tokens: int  # that it might have had
    times: RequestTimes | None  # so far, as the engine made them; None: it has given no token

    @property
    def is_whole(self) -> bool:
        """Whether it came to its end."""
        return self.reason in ("stop", "length")

    def facts(self) -> dict[str, float]:
        """Return what vLLM's histograms have of a whole answer, by their names."""
        assert self.times is not None
        times, others = self.times, self.tokens - 1
        return {
            "e2e_request_latency_seconds": self.total_s,
            "request_queue_time_seconds": times.queue_s,
            "request_prefill_time_seconds": times.prefill_s,
            "request_decode_time_seconds": times.decode_s,
            "request_inference_time_seconds": times.prefill_s + times.decode_s,
            "request_time_per_output_token_seconds": times.decode_s / others if others else 0.0,
            "request_prompt_tokens": self.prompt_tokens,
            "request_generation_tokens": self.tokens,
            "request_params_max_tokens": self.max_tokens,
        }
