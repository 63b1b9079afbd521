"""What /metrics reports, by vLLM's names, so that vLLM's dashboards and clients can read it."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from eagle_triton.engine.scheduler.requests import Piece

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)


class Metrics:
    """Counts of one server, in a registry of its own. May be called from any thread."""

    def __init__(self, model: str) -> None:
        """model: the name that requests are counted under."""
        self._registry, self._model = CollectorRegistry(), model

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", what, ["model_name", *labels], registry=self._registry)

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"vllm:{name}", what, ["model_name"], registry=self._registry).labels(model)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", what, ["model_name"], registry=self._registry, buckets=buckets).labels(
                model
            )

        self.running = gauge("num_requests_running", "Requests that are decoded, or that have their prompts read.")
        self.waiting = gauge("num_requests_waiting", "Requests in line.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts of requests that have ended.").labels(model)
        self.queried = counter("prefix_cache_queries", "Tokens of prompts, looked for in kept pages.").labels(model)
        self.found = counter("prefix_cache_hits", "Those that were found.").labels(model)
        self.generation_tokens = counter("generation_tokens", "Tokens that were generated.").labels(model)
        self.first_token = histogram("time_to_first_token_seconds", "From a request to its first token.", SECONDS)
        self.latency = histogram("e2e_request_latency_seconds", "From a request to its end.", SECONDS)
        self.token = histogram(
            "request_time_per_output_token_seconds", "Of a request, after its first token.", TOKEN_SECONDS
        )
        self._ended = counter("request_success", "Requests that have ended, by the reason.", "finished_reason")
        self._drafts = counter("spec_decode_num_drafts", "Verifications of drafts.").labels(model)
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Tokens that were drafted.").labels(model)
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.").labels(model)
        self._accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their depth in the draft, from 0.",
            "position",
        )

    def add_pieces(self, pieces: Sequence[Piece]) -> None:
        """Count what one step gave its requests."""
        self.generation_tokens.inc(sum(len(piece.tokens) for piece in pieces))
        if not (drafted := [piece for piece in pieces if piece.proposed]):
            return
        self._drafts.inc(len(drafted))
        self._draft_tokens.inc(sum(piece.proposed for piece in drafted))
        self._accepted.inc(sum(piece.accepted for piece in drafted))
        for position in range(max(piece.accepted for piece in drafted)):
            count = sum(piece.accepted > position for piece in drafted)
            self._accepted_at.labels(self._model, str(position)).inc(count)

    def add_prompt(self, tokens: int, found: int) -> None:
        """Count a prompt that was read, and its tokens; `found` of them lay in kept pages."""
        self.prompt_tokens.inc(tokens)
        self.queried.inc(tokens)
        self.found.inc(found)

    def add_end(self, reason: str, seconds: float) -> None:
        """Count a request's end: "stop", "length", "error" or "abort", `seconds` after it came."""
        self._ended.labels(self._model, reason).inc()
        self.latency.observe(seconds)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)
