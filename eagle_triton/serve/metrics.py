"""What /metrics reports. Names are vLLM's, so that its dashboards and clients work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from eagle_triton.engine.scheduler.requests import Piece, Request
from eagle_triton.inference.session import Completion
from eagle_triton.inference.statistics import Statistics

COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)


class Metrics:
    """Counts of one server, in its own registry. May be called from any thread."""

    def __init__(self, model: str, cache: Mapping[str, str] | None = None) -> None:
        """model: the label of all counts. cache: facts of the cache."""
        self._registry, self._model = CollectorRegistry(), model

        def made(kind: Any, name: str, what: str, *labels: str, **options: Any) -> Any:
            metric = kind(f"vllm:{name}", what, ["model_name", *labels], registry=self._registry, **options)
            return metric if labels else metric.labels(model)

        counter, gauge = partial(made, Counter), partial(made, Gauge)
        count, seconds, of_token = (partial(made, Histogram, buckets=of) for of in (COUNTS, SECONDS, TOKEN_SECONDS))
        self.running = gauge("num_requests_running", "Requests that are being decoded, or their prompts read.")
        self.waiting = gauge("num_requests_waiting", "Requests in line.")
        reasons = gauge("num_requests_waiting_by_reason", "Requests in line, by what they wait for.", "reason")
        self._waiting_for = reasons.labels(model, "capacity")
        self.cache_used = gauge("kv_cache_usage_perc", "The part of the cache's pages that requests hold, 0 to 1.")
        facts = gauge("cache_config_info", "Facts of the cache.", *(cache or ()))
        (facts.labels(model, *cache.values()) if cache else facts).set(1)
        self._pauses = counter("num_preemptions", "How often requests had to wait for pages.")
        self._known_pauses = 0  # of this session
        self.rejections = counter("admission_rejections", "Requests refused because the line is full.")
        self._step_tokens = count("iteration_tokens_total", "New tokens of a step, of all requests.")
        self._prompt_length = count("request_prompt_tokens", "Tokens of a request's prompt.")
        self._new_tokens = count("request_generation_tokens", "New tokens of a request.")
        self.samples = count("request_params_n", "Samples that a request asks for.")
        self._limit = count("request_params_max_tokens", "New tokens that a request allows at most.")
        self._request_pauses = count("request_num_preemptions", "How often a request had to wait for pages.")
        self.between = of_token("inter_token_latency_seconds", "Between two steps of a request.")
        phases = {
            "queue": "From a request's arrival until it enters the engine.",
            "prefill": "From entering the engine to the first token.",
            "decode": "From the first token to the end.",
            "inference": "From entering the engine to the end.",
        }
        self._phases = {name: seconds(f"request_{name}_time_seconds", what) for name, what in phases.items()}
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts of requests that have ended.")
        self.queried = counter("prefix_cache_queries", "Prompt tokens that were looked for in kept pages.")
        self.found = counter("prefix_cache_hits", "Prompt tokens that were found in kept pages.")
        self.generation_tokens = counter("generation_tokens", "Generated tokens.")
        self.first_token = seconds("time_to_first_token_seconds", "From a request's arrival to its first token.")
        self.latency = seconds("e2e_request_latency_seconds", "From a request's arrival to its end.")
        self.token = of_token("request_time_per_output_token_seconds", "Per token of a request, after its first token.")
        self._ended = counter("request_success", "Requests that have ended, by the reason.", "finished_reason")
        self._drafts = counter("spec_decode_num_drafts", "Verifications with drafts.")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        what = "Accepted tokens by their depth in the draft, from 0."
        self._accepted_at = counter("spec_decode_num_accepted_tokens_per_pos", what, "position")

    def add_pieces(self, pieces: Sequence[Piece]) -> None:
        """Count a step's pieces."""
        tokens = sum(len(piece.tokens) for piece in pieces)
        self.generation_tokens.inc(tokens)
        if tokens:
            self._step_tokens.observe(tokens)
        if not (drafted := [piece for piece in pieces if piece.proposed]):
            return
        self._drafts.inc(len(drafted))
        self._draft_tokens.inc(sum(piece.proposed for piece in drafted))
        self._accepted.inc(sum(piece.accepted for piece in drafted))
        for position in range(max(piece.accepted for piece in drafted)):
            count = sum(piece.accepted > position for piece in drafted)
            self._accepted_at.labels(self._model, str(position)).inc(count)

    def add_prompt(self, statistics: Statistics) -> None:
        """Count the prompt of a request that has ended."""
        self.prompt_tokens.inc(statistics.prompt_tokens)
        self.queried.inc(statistics.prompt_tokens)
        self.found.inc(statistics.found_tokens)

    def set_waiting(self, count: int) -> None:
        """Set the number of waiting requests."""
        self.waiting.set(count)
        self._waiting_for.set(count)

    def set_cache(self, used: float, pauses: int) -> None:
        """Set the used part of the cache, and how often requests of this session have waited for pages. A smaller
        number than before means a new session."""
        self.cache_used.set(used)
        self._pauses.inc(pauses - self._known_pauses if pauses >= self._known_pauses else pauses)
        self._known_pauses = pauses

    def add_completion(self, request: Request, completion: Completion, seconds: Mapping[str, float]) -> None:
        """Count a finished request. seconds: of its phases."""
        self._prompt_length.observe(len(request.prompt))
        self._new_tokens.observe(len(completion.tokens))
        self._limit.observe(request.max_new_tokens)
        self._request_pauses.observe(completion.pauses)
        for phase, time in seconds.items():
            self._phases[phase].observe(time)

    def add_end(self, reason: str, seconds: float) -> None:
        """Count a request's end: "stop", "length", "error" or "abort", `seconds` after it came."""
        self._ended.labels(self._model, reason).inc()
        self.latency.observe(seconds)

    def text(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        return generate_latest(self._registry)
