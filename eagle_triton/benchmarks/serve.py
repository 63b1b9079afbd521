"""Puts load on an OpenAI server, and measures the latency of requests and the server's throughput.

Open loop: requests come at random times (a Poisson process), whether others have ended or not. Closed loop: each of a
number of clients sends its next request when it has its answer. Rows have the names of vLLM's `vllm bench serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from eagle_triton.benchmarks.modes import ends_of, milliseconds_of

if TYPE_CHECKING:
    import aiohttp

SERVE = "import sys; from eagle_triton.serve.main import main; sys.exit(main(sys.argv[1:]))"
TOKENS = 256  # prompts have token ids below this, which every vocabulary has
WARM_UPS = 3  # requests that are not counted
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Load:
    """Requests per second, or the number of clients; the other is None."""

    rate: float | None = None
    clients: int | None = None

    def __str__(self) -> str:
        return f"{self.rate:g} a second" if self.rate is not None else f"{self.clients} clients"


@dataclass
class Answer:
    """The times of a request in seconds: to the first tokens, between later ones, and in total."""

    input_tokens: int
    output_tokens: int = 0
    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    whole: float = 0.0
    error: str = ""

    @property
    def milliseconds(self) -> dict[str, float]:
        """Its times by vLLM's names: to the first token, for each token after it, and in total."""
        per_token = (self.whole - self.first) / max(1, self.output_tokens - 1)
        return {"ttft": self.first * 1e3, "tpot": per_token * 1e3, "e2el": self.whole * 1e3}


COLUMNS = (
    "=variant, requests=completed, failed, requests/s=request_throughput, good/s=request_goodput, "
    "tokens/s=output_throughput, first token ms=median_ttft_ms, p99=p99_ttft_ms, ms/token=median_tpot_ms, "
    "p99=p99_tpot_ms, gap p99=p99_itl_ms"
)


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Add a row for each load on the server at --url, or on one that is started here."""
    loads = [Load(rate=rate) for rate in args.request_rate] + [Load(clients=count) for count in args.max_concurrency]
    with ExitStack() as started:
        url = args.url or started.enter_context(_own_server(args, notes))
        model = asyncio.run(_served_model(url, args.api_key))
        for number, load in enumerate(tqdm(loads, desc="loads", disable=args.json or None, leave=False)):
            prompts = _requests(args, number)
            begin = time.perf_counter()
            answers = asyncio.run(_ask_all(url, model, args, load, prompts))
            row = figures(answers, time.perf_counter() - begin, dict(map(milliseconds_of, args.goodput)))
            told = {"request_rate": "inf" if load.rate is None else load.rate, "max_concurrency": load.clients}
            rows.append({"variant": str(load), "num_prompts": args.num_prompts, "burstiness": 1.0, **told, **row})
            failed = [answer.error for answer in answers if answer.error]
            if failed:
                notes.append(f"FAIL: {load}: {len(failed)} of {len(answers)} requests, the first: {failed[0]}")
            if args.result_dir is not None:
                _write_as_vllm(args.result_dir, model, rows[-1], answers)


def figures(answers: Sequence[Answer], seconds: float, goodput: Mapping[str, float]) -> dict[str, Any]:
    """A row for requests that took `seconds` together. goodput: the most milliseconds of a good request, by `ttft`,
    `tpot` and `e2el`."""
    done = [answer for answer in answers if not answer.error]
    tokens, read = sum(answer.output_tokens for answer in done), sum(answer.input_tokens for answer in done)
    of_each = {name: [answer.milliseconds[name] for answer in done] for name in ("ttft", "e2el")}
    of_each["tpot"] = [answer.milliseconds["tpot"] for answer in done if answer.output_tokens > 1]
    of_each["itl"] = [gap * 1e3 for answer in done for gap in answer.gaps]
    good = sum(all(answer.milliseconds[name] <= most for name, most in goodput.items()) for answer in done)
    row: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "total_input_tokens": read,
        "total_output_tokens": tokens,
        "request_throughput": len(done) / seconds,
        "request_goodput": good / seconds if goodput else None,
        "output_throughput": tokens / seconds,
        "total_token_throughput": (read + tokens) / seconds,
    }
    for name, values in of_each.items():
        found = np.array(values or [math.nan])
        row |= {f"{what}_{name}_ms": float(getattr(np, what)(found)) for what in ("mean", "median", "std")}
        row |= {f"p{percent}_{name}_ms": float(np.percentile(found, percent)) for percent in PERCENTILES}
    return row


def _requests(args: argparse.Namespace, number: int) -> list[tuple[list[int], int]]:
    """Prompts that no other load has, and the number of tokens to generate after each."""
    source, read, told = random.Random(f"{args.seed} {number}"), ends_of(args.input_len), ends_of(args.output_len)
    return [
        (source.choices(range(TOKENS), k=source.randint(*read)), source.randint(*told)) for _ in range(args.num_prompts)
    ]


async def _ask_all(
    url: str, model: str, args: argparse.Namespace, load: Load, prompts: Sequence[tuple[list[int], int]]
) -> list[Answer]:
    """The answers to all requests of a load, in order."""
    body = {"model": model, "temperature": args.temperature}
    async with client(args.api_key) as session:
        for _ in range(WARM_UPS):
            tokens = random.choices(range(TOKENS), k=ends_of(args.input_len)[1])
            await ask(session, url, {**body, "prompt": tokens, "max_tokens": 4})

        source, start = random.Random(args.seed), time.perf_counter()
        gaps = [0.0 if load.rate is None else source.expovariate(load.rate) for _ in prompts[1:]]
        clients = asyncio.Semaphore(load.clients or len(prompts))

        async def one(due: float, prompt: list[int], new: int) -> Answer:
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            async with clients:  # in the order of the requests
                return await ask(session, url, {**body, "prompt": prompt, "max_tokens": new})

        times = itertools.accumulate(gaps, initial=0.0)
        return await asyncio.gather(*(one(due, *request) for due, request in zip(times, prompts, strict=True)))


def client(key: str | None) -> aiohttp.ClientSession:
    """A client without a limit on connections or time. Use as an asynchronous context manager."""
    import aiohttp  # the extra benchmark

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=limits, timeout=aiohttp.ClientTimeout(total=None), headers=headers)


async def ask(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Answer:
    """One streamed completion, which ignores stop tokens."""
    import aiohttp

    answer = Answer(len(body["prompt"]))
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    start = last = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/completions", json=asked) as response:
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:300]}"
                return answer
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now, event = time.perf_counter(), json.loads(line[6:])
                if event.get("error"):
                    answer.error = str(event["error"].get("message", event["error"]))
                if any(choice["text"] or not choice["finish_reason"] for choice in event.get("choices", ())):
                    if answer.first:
                        answer.gaps.append(now - last)
                    else:
                        answer.first = now - start
                    last = now
                if event.get("usage"):
                    answer.output_tokens = event["usage"]["completion_tokens"]
    except (aiohttp.ClientError, OSError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.whole = last - start
    return answer


async def _served_model(url: str, key: str | None) -> str:
    """The name of a server's first model. Raises ValueError if no server answers at the address."""
    import aiohttp

    try:
        async with client(key) as session, session.get(f"{url}/v1/models") as response:
            response.raise_for_status()
            return (await response.json())["data"][0]["id"]
    except (aiohttp.ClientError, OSError, LookupError) as error:
        raise ValueError(f"--url {url}: no model is served there: {error}") from None


def _write_as_vllm(folder: Path, model: str, row: Mapping[str, Any], answers: Sequence[Answer]) -> None:
    """Write one load in the format of `vllm bench serve --save-detailed`."""
    folder.mkdir(exist_ok=True)
    facts: dict[str, Any] = {"date": datetime.now().strftime("%Y%m%d-%H%M%S")}
    facts |= {"endpoint_type": "openai", "backend": "openai", "label": None, "model_id": model, "tokenizer_id": model}
    facts |= {name: value for name, value in row.items() if name != "variant"}
    lists = {
        "input_lens": [answer.input_tokens for answer in answers],
        "output_lens": [answer.output_tokens for answer in answers],
        "ttfts": [answer.first for answer in answers],
        "itls": [answer.gaps for answer in answers],
        "errors": [answer.error for answer in answers],
    }
    name = f"openai-{row['request_rate']}qps-concurrency{row['max_concurrency']}.json"
    (folder / name).write_text(json.dumps({**facts, **lists}, indent=2) + "\n", encoding="utf-8")


# --- a server in another process ---


@contextmanager
def _own_server(args: argparse.Namespace, notes: list[str]) -> Iterator[str]:
    """Start `eagle-triton serve` with the options' model in another process. Yields its address. A note has the time of
    its warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        words = [args.model]
        if args.shape is not None:
            _save_random(args, Path(folder))
            words = [folder, "--served-model-name", args.shape]
        words += [] if args.draft is None else ["--draft", args.draft]
        words += ["--speculative-config", '{"method": "naive"}'] if args.no_speculation else []
        words += ["--max-num-seqs", str(args.max_num_seqs), "--warm-up", "--device", args.device]
        words += ["--dtype", args.dtype, "--max-queue", str(args.num_prompts)]
        words += [] if args.api_key is None else ["--api-key", args.api_key]
        longest = ends_of(args.input_len)[1] + ends_of(args.output_len)[1]
        log: list[str] = []
        with own_server([*words, "--max-model-len", str(max(8, longest + 1))], log) as url:
            notes += [line.partition("session: ")[2].strip() for line in log if "steps over up to" in line]
            yield url


@contextmanager
def own_server(words: Sequence[str], log: list[str]) -> Iterator[str]:
    """Start `eagle-triton serve` in another process. Yields its address. Its log goes to `log`. Raises ValueError if
    the process ends at once."""
    command = [sys.executable, "-c", SERVE, *words, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            yield f"http://127.0.0.1:{port_of(server, log)}"
        finally:
            server.terminate()
            server.wait()


def port_of(server: subprocess.Popen[str], lines: list[str]) -> int:
    """The port of a server, once it listens. Its log goes to `lines`, now and later. Raises ValueError if it ends."""
    assert server.stderr is not None
    for line in server.stderr:
        lines.append(line)
        if found := re.search(r"is served at http://[^:]+:(\d+)", line):
            read_on = threading.Thread(target=lines.extend, args=(server.stderr,), daemon=True)  # a full pipe stops it
            read_on.start()
            port = int(found.group(1))
            while server.poll() is None:
                try:
                    with socket.create_connection(("127.0.0.1", port)):
                        return port
                except ConnectionRefusedError:
                    time.sleep(0.1)
    raise ValueError("the server ended: " + "".join(lines[-20:]))


def _save_random(args: argparse.Namespace, folder: Path) -> None:
    """Save a shape's random weights with a head as a checkpoint, with a tokenizer that has numbers as words."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    from eagle_triton.benchmarks.models import random_model

    model = random_model(args.shape, True, args.device, getattr(torch, args.dtype))
    words = Tokenizer(WordLevel({str(token): token for token in range(model.vocab_size)}, unk_token="0"))
    words.pre_tokenizer = Whitespace()
    model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    model.save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the server needs it
