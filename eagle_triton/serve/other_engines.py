"""`eagle-triton serve --engine vllm|sglang`: that engine's own server, with the same model and drafts.

A head is exported into a directory that is removed with the server. A speculative config is translated. An option that
the other server does not have is refused by name.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from eagle_triton.command_line import Parser
from eagle_triton.export.launch_plan import flags

log = logging.getLogger(__name__)

ENGINES = ("vllm", "sglang")
SHARED = ("model", "draft", "speculative_config", "engine", "config")  # read here
_BY_ONE_NAME = {name: name for name in ("host", "port", "api_key", "served_model_name", "chat_template", "dtype")}
PASSED_ON = {  # this program's options, and their names there
    "vllm": {**_BY_ONE_NAME, **{name: name for name in ("max_model_len", "max_num_seqs", "root_path")}},
    "sglang": {
        **_BY_ONE_NAME,
        "max_model_len": "context_length",
        "max_num_seqs": "max_running_requests",
        "root_path": "fastapi_root_path",
    },
}
TREE = {"topk": "top_k", "num_draft_tokens": "total_token"}  # of an exported head


def serve_elsewhere(parser: Parser, args: argparse.Namespace) -> int:
    """Run the engine's server until it ends, and pass signals on. Returns its exit code.

    args: as `serve` has read them; `named` are the given ones. Defaults are the other server's, but for host and port.
    """
    _check(parser, args)
    with tempfile.TemporaryDirectory(prefix="eagle_triton-") as folder, parser.explains():
        command = _command(args, Path(folder) / "head")
        known = PASSED_ON[args.engine]
        handed_on = args.named | {"host", "port"}
        command += flags({theirs: getattr(args, name) for name, theirs in known.items() if name in handed_on})
        log.info("%s", " ".join("..." if word == args.api_key else word for word in command))
        return _run(command)


def _check(parser: Parser, args: argparse.Namespace) -> None:
    """Refuse options that the other server does not read. Stop if it is not installed."""
    tree = TREE if args.engine == "sglang" else {}  # vLLM drafts chains
    heads = () if args.speculative_config else (*tree, "num_steps")
    for name in sorted(args.named):
        if name not in (*SHARED, *heads, *PASSED_ON[args.engine]):
            parser.error(f"--{name.replace('_', '-')} is not read with --engine {args.engine}")
    if args.draft == "mtp":
        parser.error(
            f"--draft mtp is not read with --engine {args.engine}: "
            '--speculative-config \'{"method": "mtp", "num_model_steps": 1}\' means the same'
        )
    if args.draft and args.speculative_config:
        parser.error(f"--draft must come without --speculative-config with --engine {args.engine}: it names the head")
    if args.num_draft_tokens == "auto":
        parser.error(f"--num-draft-tokens must be a number with --engine {args.engine}, which has no auto")
    missing = not shutil.which("vllm") if args.engine == "vllm" else importlib.util.find_spec("sglang") is None
    if missing:
        parser.stop(f"{args.engine} is not installed: pip install {args.engine}")


def _command(args: argparse.Namespace, folder: Path) -> list[str]:
    """The server's command. The caller may add options."""
    vllm = args.engine == "vllm"
    if args.speculative_config is not None:
        from eagle_triton.models.loading import saved_target

        config, target = args.speculative_config, saved_target(args.model)
        if vllm:
            options = config.to_vllm()
            words = ["vllm", "serve", target, *flags({} if options is None else {"speculative_config": options})]
        else:
            words = ["python", "-m", "sglang.launch_server", *flags({"model_path": target, **config.to_sglang()})]
    else:
        from eagle_triton.export.export_head import export_head

        tree = {theirs: getattr(args, ours) for ours, theirs in TREE.items()}
        depth = None if args.num_steps is None else args.num_steps - 1
        head, target_of = (args.model, None) if args.draft is None else (args.draft, args.model)
        plan = export_head(head, args.engine, folder, target_of, **tree, depth=depth)
        for note in plan.notes:
            log.info("%s", note)
        words = list(plan.command)
    return [sys.executable, *words[1:]] if words[0] == "python" else words


def _run(command: list[str]) -> int:
    process = subprocess.Popen(command)

    def hand_on(sig: int, frame: FrameType | None) -> None:
        process.send_signal(sig)

    before = {sig: signal.signal(sig, hand_on) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        return process.wait()
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
