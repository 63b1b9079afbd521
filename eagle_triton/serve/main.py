"""`eagle-triton serve`: OpenAI's endpoints over one model, and a page to try it at.

    eagle-triton serve                              the embedded checkpoint, at http://127.0.0.1:8000
    eagle-triton serve PATH_OR_ID --draft HEAD      a target and an EAGLE head
    eagle-triton serve PATH_OR_ID --speculative-config '{"method": "suffix", "num_speculative_tokens": 8}'
    eagle-triton serve --config FILE.yaml           options from a file; the command line takes precedence
    eagle-triton serve PATH_OR_ID --draft HEAD --engine vllm    start vLLM's own server, with the head in its layout

POST /v1/chat/completions, /v1/completions; GET /v1/models, /health, /metrics, and / for the page.
SIGTERM and Ctrl-C finish running requests and refuse the rest. Exit code 0: after a signal; 1: the engine's process has
ended, or processes that share a target have lost each other; 2: a wrong argument, or a model that cannot be served.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import logging
import os
import signal
import socket
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from eagle_triton import command_line
from eagle_triton.command_line import Parser
from eagle_triton.demo import BLOCKS, PAIR
from eagle_triton.serve.other_engines import ENGINES, serve_elsewhere

if TYPE_CHECKING:
    from eagle_triton.inference.eagle_inference import EAGLEInference
    from eagle_triton.inference.session import Session
    from eagle_triton.inference.speculative_config import SpeculativeConfig
    from eagle_triton.serve.engine_client import EngineClient

log = logging.getLogger(__name__)

NEEDS = ("fastapi", "uvicorn", "prometheus_client", "jinja2", "yaml")  # the extra serve
TREE_OPTIONS = ("topk", "num_steps", "num_draft_tokens", "suffix_drafts")  # of EAGLEConfig
SWITCH_SECONDS = 0.0005  # how long Python runs one thread while another waits: HTTP must not delay the engine
HEADER_SECONDS = 20  # for a new connection to send the head of its first request
CLOSING_SECONDS = 5  # for connections, after the last answer
APART = (
    "is not offered: the server reads prompts and decodes on the same GPUs. SGLang and vLLM can separate the two; "
    "docs/scaling.md has the commands"
)
ELSEWHERE = {  # options of other servers
    "--tensor-parallel-size": (
        "is an option of torchrun here: torchrun --nproc-per-node N --no-python eagle-triton serve MODEL. For vLLM and "
        "SGLang, give it to eagle-triton export, which prints their command"
    ),
    "--quantization": "is read from the checkpoint: eagle-triton quantize MODEL --to fp8 -o OUT writes one in FP8",
    **dict.fromkeys(("--splitwise-role", "--disaggregation-mode", "--kv-transfer-config"), APART),
}
ELSEWHERE |= {"-tp": ELSEWHERE["--tensor-parallel-size"], "--tp-size": ELSEWHERE["--tensor-parallel-size"],
              "--model-path": "is --model here", "-q": ELSEWHERE["--quantization"]}  # fmt: skip
KEY_VARIABLE = "EAGLE_TRITON_API_KEY"
SPECIAL = ("--config", "--help")  # options that a file does not have
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def main(argv: list[str] | None = None, program: str = "eagle-triton serve") -> int:
    """Serve until a signal ends it. program: the name in help and errors."""
    parser = _parser(program)
    args = _parse(parser, sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if args.engine is not None:
        return serve_elsewhere(parser, args)
    command_line.check_device(parser, args.device)
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        parser.stop(f'not installed: {", ".join(missing)}; pip install ".[serve]" in a clone of this repository')
    sys.setswitchinterval(SWITCH_SECONDS)
    with ExitStack() as last:
        try:
            if _ranks() > 1 and os.environ.get("RANK", "0") != "0":
                return _follow(parser, args)
            return _answer(parser, args, last)
        except KeyboardInterrupt:  # before the server answers, so no request is running
            return 0


def _answer(parser: Parser, args: argparse.Namespace, last: ExitStack) -> int:
    """Serve until a signal ends it. last: closes everything that was started, also after an error."""
    with parser.explains():
        import uvicorn

        from eagle_triton.engine.memory.pages import PAGE_ROWS
        from eagle_triton.serve.app import Service, make_app
        from eagle_triton.serve.engine_client import EngineClient
        from eagle_triton.serve.engine_process import EngineProcess, Served
        from eagle_triton.serve.metrics import Metrics
        from eagle_triton.serve.prompts import PromptReader

        if (positions := command_line.stored_positions(args.model)) is not None:
            _max_model_len(args.max_model_len, positions)  # before anything is loaded
        template = None if args.chat_template is None else args.chat_template.read_text(encoding="utf-8")
        bound = _bind(args.host, args.port)
        process = None
        log.info("loading %s", args.model)
        if _ranks() > 1:  # only this process has joined them
            inference = _load(args)
            served = Served.read(inference)
        else:
            process = last.enter_context(closing(EngineProcess(_load, args)))
            served = process.served
        rows = _max_model_len(args.max_model_len, served.max_positions)
        open_session = functools.partial(_open, rows=rows, all_sizes=args.warm_up)
        if process is not None:
            process.open(open_session)
        prompts, name = PromptReader(served, rows, template), args.served_model_name or args.model
        room = args.cache_tokens or served.config.slots * rows
        cache = {
            "block_size": str(PAGE_ROWS),
            "num_gpu_blocks": str(args.cache_tokens and -(-args.cache_tokens // PAGE_ROWS)),
            "kv_cache_size_tokens": str(room),
            "kv_cache_max_concurrency": f"{room / rows:.2f}",
            "enable_prefix_caching": str(served.config.prefixes),
        }
        there = process or functools.partial(open_session, inference)
        engine = EngineClient(there, Metrics(name, cache), served.config.slots, args.max_queue)
        hosts = (args.host, *args.allowed_hosts)
        app = make_app(
            Service(engine, prompts, served.drafters, name, args.api_key, args.log_prompts, args.model, hosts,
                    args.allowed_origins, args.root_path)
        )  # fmt: skip
        log.info("warming up")
        engine.start()
    try:
        if args.host not in LOOPBACK and args.api_key is None:
            log.warning("no --api-key is set: anyone who can reach %s may send requests", args.host)
        log.info("%s", served.words)
        host = f"[{args.host}]" if ":" in args.host else args.host
        log.info("%s is served at http://%s:%d", name, host, bound.getsockname()[1])
        config = uvicorn.Config(
            app, lifespan="off", log_config=None, access_log=False, server_header=False, ws="none", http=protocol(),
            timeout_graceful_shutdown=args.shutdown_timeout + CLOSING_SECONDS,
        )  # fmt: skip
        _server(config, engine, args.shutdown_timeout).run(sockets=[bound])
    finally:
        engine.close()
    return int(engine.lost)


def _ranks() -> int:
    """The number of processes that share the target; torchrun starts them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _follow(parser: Parser, args: argparse.Namespace) -> int:
    """On the other ranks: decode with rank 0, which answers, until it ends."""
    from eagle_triton.engine.ranks import RanksError

    with parser.explains():
        inference = _load(args)
        rows = _max_model_len(args.max_model_len, inference.pair.max_positions)
        session = inference.session(rows)
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, signal.SIG_IGN)  # rank 0 gets them too, and finishes running requests
    log.info("rank %s of %d: rank 0 answers", os.environ["RANK"], _ranks())
    try:
        session.follow()  # type: ignore[attr-defined]  # ranks share the target
    except RanksError as error:
        log.error("%s", error)
        return 1
    return 0


def protocol() -> type[Any]:
    """uvicorn's HTTP protocol. It also closes a connection that sends no request in time."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol

    class Impatient(base):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(HEADER_SECONDS, self._give_up)

        def _give_up(self) -> None:
            if self.cycle is None and not self.transport.is_closing():  # no whole request has come
                self.transport.close()

    return Impatient


def _server(config: Any, engine: EngineClient, seconds: int) -> Any:
    """uvicorn's server. On a signal the engine finishes running requests; a second Ctrl-C ends it at once."""
    import uvicorn

    server: Any = uvicorn.Server(config)

    def stop(sig: int, frame: FrameType | None) -> None:
        if not server.should_exit:
            engine.drain(seconds)
        server.force_exit = server.should_exit and sig == signal.SIGINT
        server.should_exit = True

    def end() -> None:
        server.should_exit = True

    server.handle_exit, engine.when_lost = stop, end
    return server


def _load(args: argparse.Namespace) -> EAGLEInference:
    import torch

    from eagle_triton.devices import choose_threads, find_device
    from eagle_triton.inference.config import EAGLEConfig
    from eagle_triton.inference.eagle_inference import EAGLEInference
    from eagle_triton.inference.load import comes_with_draft

    options: dict[str, Any] = {name: value for name in TREE_OPTIONS if (value := getattr(args, name)) is not None}
    if args.speculative_config is not None:
        options["speculative"] = args.speculative_config
    drafter = options["speculative"].model if "speculative" in options else args.draft
    choose_threads(find_device(args.device), args.model, drafter)
    config = EAGLEConfig(
        temperature=args.temperature,
        slots=args.max_num_seqs,
        fallback=not args.no_fallback,
        cache_tokens=args.cache_tokens,
        dtype=args.dtype and getattr(torch, args.dtype),
        activations=args.activations.replace("-", " "),
        draft_dtype=args.draft_dtype,
        **options,
    )
    tp_plan, draft = "auto" if _ranks() > 1 else None, args.draft
    if draft is None and not options and not comes_with_draft(args.model):
        draft = "suffix"
        log.info("%s has no draft beside it: drafting from text that occurred before; --draft names a head", args.model)
    return EAGLEInference.from_pretrained(args.model, draft, config, args.device, tp_plan=tp_plan)


def _open(inference: EAGLEInference, rows: int, all_sizes: bool) -> Session:
    """Open a session. Compile and capture its steps for one request; all_sizes: for any number of requests."""
    session = inference.session(rows)
    captures = inference.engine.cuda_graph  # without graphs the first size prepares all
    session.prepare(None if all_sizes and captures else 1)
    return session


def _max_model_len(asked: int | None, positions: int | None) -> int:
    longest = asked or positions
    if longest is None:
        raise ValueError("--max-model-len must be given: the model does not say how many positions it has")
    if positions is not None and longest > positions:
        raise ValueError(f"--max-model-len must be at most the model's {positions} positions, got {asked}")
    return longest


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises OSError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise OSError(f"cannot listen on --host {host}: {error.strerror}") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return bound


# --- the command line ---


# fmt: off
def _parser(program: str) -> Parser:
    parser = Parser(program, (__doc__ or "").replace("eagle-triton serve", program), ELSEWHERE)
    add, model, text = parser.add_argument, command_line.model, command_line.some_text
    whole, number, file = command_line.whole, command_line.number, command_line.existing_file
    add("model", nargs="?", type=model, metavar="MODEL", help="the target: directory or hub id (default: demo)")
    add("--model", dest="model_option", type=model, metavar="MODEL", help="the same as MODEL, as an option")
    add("--draft", type=model, metavar="HEAD", help="an EAGLE head, a block drafter (demo-block: the demo's), an "
        "assistant of Gemma 4, or mtp (default: the draft beside the target, else text that occurred before)")
    add("--speculative-config", type=_speculative, metavar="JSON", help="how to draft, in the form that vLLM takes")
    add("--topk", type=whole(), metavar="K", help="children of each expanded node of the tree")
    add("--num-steps", type=whole(), metavar="D", help="levels of the tree")
    add("--num-draft-tokens", type=_nodes, metavar="N", help="nodes of the tree, root included, or auto")
    add("--suffix-drafts", type=whole(0), metavar="N", help="tokens drafted from text that occurred before")
    add("--host", type=text, default="127.0.0.1", help="where to listen (default: 127.0.0.1)")
    add("--port", type=whole(0, 65535), default=8000, metavar="N", help="default: 8000; 0: a free one")
    add("--root-path", type=_prefix, default="", metavar="/PREFIX", help="prefix of all paths at a proxy")
    add("--api-key", type=text, metavar="KEY", help=f"requests must send it (default: {KEY_VARIABLE}, else none)")
    add("--api-key-file", type=file, metavar="FILE", help="a file with the key")
    add("--allowed-origins", type=_names, default=(), metavar="A,B", help="web origins that may ask it; * for all")
    add("--allowed-hosts", type=_names, default=(), metavar="A,B", help="host names by which requests without a key "
        "may call the server, besides addresses, localhost and --host; * for all")
    add("--served-model-name", type=text, metavar="NAME", help="the model's name for clients (default: MODEL)")
    add("--max-model-len", type=whole(8), metavar="N", help="most tokens of prompt and answer (default: all "
        "positions of the model)")
    add("--max-num-seqs", type=whole(most=256), default=64, metavar="N", help="requests that run at the same time "
        "(default: 64)")
    add("--warm-up", action="store_true", help="first capture the steps for every number of requests")
    add("--no-fallback", action="store_true", help="keep drafting even if plain decoding is faster")
    add("--max-queue", type=whole(0), default=256, metavar="N", help="requests that may wait (default: 256); else 429")
    add("--cache-tokens", type=whole(), metavar="N", help="tokens that the cache holds (default: it grows)")
    add("--temperature", type=number(0, 100), default=1.0, metavar="T", help="of requests that give none (default: 1)")
    add("--chat-template", type=file, metavar="FILE", help="a Jinja file (default: the tokenizer's)")
    add("--shutdown-timeout", type=whole(0, 86400), default=30, metavar="SECONDS", help="after SIGTERM, wait this long "
        "for running requests (default: 30)")
    add("--log-prompts", action="store_true", help="write prompts and answers to the log")
    command_line.add_device(parser)
    add("--activations", choices=("exact", "as-published"), default="exact", help="inputs of FP8 projections: not "
        "rounded (exact, the default), or rounded as their modules do")
    add("--draft-dtype", choices=("fp8", "int4"), help="copy the draft's weights to 8 or 4 bits (default: as they are)")
    add("--engine", choices=ENGINES, help="start that engine's own server instead")
    add("--config", type=file, metavar="FILE", help="YAML file with these options")
    return parser
# fmt: on


def _parse(parser: Parser, argv: list[str]) -> argparse.Namespace:
    args, words = parser.parse_args(argv), argv
    if args.config is not None:
        given, words = args, [*_read_config(parser, args.config), *argv]  # the last value of an option counts
        args = parser.parse_args(words)
        if given.model is not None:
            args.model_option = given.model_option
    if None not in (args.model, args.model_option) and args.model != args.model_option:
        parser.error(f"--model must be given once, got {args.model} and {args.model_option}")
    args.model = args.model or args.model_option or PAIR
    written = {word.partition("=")[0] for word in words}
    args.named = {action.dest for action in parser._actions if written & {*action.option_strings}} - {"model_option"}
    _read_key(parser, args)
    if args.draft is not None and args.draft not in BLOCKS and args.model == PAIR:
        parser.error(
            f"--draft must be {' or '.join(BLOCKS)} for the demo, which has its own head, got {args.draft}; another "
            "draft needs its MODEL, and drafts from earlier text are --suffix-drafts"
        )
    if shaped := [name for name in TREE_OPTIONS if getattr(args, name) is not None and args.speculative_config]:
        parser.error(f"--{shaped[0].replace('_', '-')} is not read with --speculative-config, which has its own")
    return args


def _read_key(parser: Parser, args: argparse.Namespace) -> None:
    """Read the key from a file or the environment, unless the command line has it."""
    if args.api_key_file is not None:
        if args.api_key is not None:
            parser.error("--api-key-file must come without --api-key")
        args.api_key = args.api_key_file.read_text(encoding="utf-8").strip()
        if not args.api_key:
            parser.error(f"--api-key-file: {args.api_key_file} is empty")
    args.api_key = args.api_key or os.environ.get(KEY_VARIABLE) or None
    if args.api_key is not None:
        args.named = args.named - {"api_key_file"} | {"api_key"}


def _read_config(parser: Parser, path: Path) -> list[str]:
    """A file's options in the form of a command line."""
    import yaml

    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            parser.error(f"--config: {path} must be a YAML mapping of options to values")
        read = [(key, value, loader.construct_object(value, deep=True)) for key, value in root.value]
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        parser.error(f"--config: {path} cannot be read: {command_line.one_line(error)}")
    known = {name: action for action in parser._actions for name in action.option_strings if name not in SPECIAL}
    options, seen = [], set()
    for key_node, node, value in read:
        key = str(key_node.value)
        option = f"--{key.replace('_', '-')}"
        if option in seen:
            parser.error(f"--config: {key!r:.60} is given twice")
        seen.add(option)
        if option in ELSEWHERE:
            parser.error(f"--config: {key} {ELSEWHERE[option]}")
        if option not in known:
            names = sorted({name[2:] for name in known if name.startswith("--")} - {"model"})
            parser.error(f"--config: {key!r:.60} is no option; the options are model, {', '.join(names)}")
        if value is None:
            continue
        if known[option].nargs == 0:
            if not isinstance(value, bool):
                parser.error(f"--config: {key} must be true or false, got {value!r:.60}")
            options += [option] * value
        elif isinstance(value, dict) and option == "--speculative-config":
            options.append(f"{option}={json.dumps(value)}")
        elif node.id != "scalar" or isinstance(value, bool):
            parser.error(f"--config: {key} must be one value, got {value!r:.60}")
        else:
            options.append(f"{option}={node.value}")  # as written: 0123 may be a key
    return options


def _names(text: str) -> tuple[str, ...]:
    """Names, separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _prefix(text: str) -> str:
    """A path prefix; may be empty."""
    if text and (not text.startswith("/") or text.endswith("/")):
        raise argparse.ArgumentTypeError(f"must begin with / and not end with it, got {text!r}")
    return text


def _speculative(text: str) -> SpeculativeConfig:
    """How to draft, from JSON."""
    from eagle_triton.inference.speculative_config import SpeculativeConfig

    try:
        return SpeculativeConfig.from_json(text)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _nodes(text: str) -> int | str:
    return text if text == "auto" else command_line.whole(2)(text)


if __name__ == "__main__":
    sys.exit(main())
