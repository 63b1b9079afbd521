"""Command lines that answer a wrong argument with one sentence: which argument, what came, what is valid.

It uses only the standard library, so that `--help` and errors need no slow import and a bare Python can run it.
"""

from __future__ import annotations

import argparse
import ctypes
import difflib
import errno
import importlib.util
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from eagle_triton.demo import BLOCKS, PAIR, path_of

DTYPES = ("float32", "bfloat16", "float16")
PLOTS = (".png", ".svg", ".pdf")
MAX_RUNS = 10_000
MAX_TOKENS = 10_000_000  # more than any model has positions
UNWRITTEN = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # errors of an output, not of an argument

Number = TypeVar("Number", int, float)


class Parser(argparse.ArgumentParser):
    """Takes no abbreviations, and ends a wrong call with one line on stderr and exit code 2.

    elsewhere: hints for arguments that only another command has.
    """

    def __init__(self, prog: str, description: str, elsewhere: Mapping[str, str] | None = None) -> None:
        shown = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=description, formatter_class=shown, allow_abbrev=False)
        self.elsewhere = elsewhere or {}

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._about(unknown[0]))
        return found

    def error(self, message: str) -> NoReturn:
        """One line: `usage_example.py: --max-new-tokens must be a whole number from 1 to 9, got '-3' (see --help)`."""
        line = re.sub(r"^argument ", "", one_line(message))
        line = re.sub(r": invalid choice: (.*?) \(choose from (.*)\)$", _choices, line)
        self.stop(f"{line.replace(': must ', ' must ', 1)} (see --help)")

    def unread(self, name: str, by: str, readers: Iterable[str]) -> NoReturn:
        """End the program because an argument is not read by `by`, such as "--to vllm", but by the readers."""
        self.error(f"{option_of(name)} is not read by {by}, but by {', '.join(readers)}")

    def stop(self, sentence: str) -> NoReturn:
        """Exit with code 2 and a sentence that names no option."""
        self.exit(2, f"{self.prog}: {sentence}\n")

    @contextmanager
    def explains(self, what: str = "") -> Iterator[None]:
        """Turn errors of refused input inside the block into one sentence after `what`. Other errors pass."""
        try:
            yield
        except ModuleNotFoundError as error:
            self.stop(f"{error.name} is not installed: python3 setup_env.py --install makes an environment that has it")
        except (ValueError, TypeError, OSError) as error:
            if is_unwritten(error):
                raise
            self.stop(f"{what}{': ' * bool(what)}{sentence(error)}")

    def _about(self, argument: str) -> str:
        name = argument.partition("=")[0]
        if name in self.elsewhere:
            return f"{name} {self.elsewhere[name]}"
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        options = [option for action in shown for option in action.option_strings[-1:]]
        if near := name.startswith("-") and nearest(name, options):
            return f"{argument!r} is no argument of this command; did you mean {' or '.join(near)}?"
        return f"{argument!r} is no argument of this command; its options are {', '.join(options)}"


def run_program(main: Callable[[], int], name: str | None = None) -> int:
    """Run a program by its main function, and return its exit code: 130 if Ctrl-C ended it, 1 if its output could not
    be written. The latter is said on stderr in one sentence, unless the output is a pipe that its reader has closed.

    name: what the program is called there; None: the name of its file.
    """
    try:
        code = main()
        print(end="", flush=True)  # what cannot be written fails here
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if not is_unwritten(error):
            raise
        try:
            print(end="", flush=True)
        except OSError:  # what is left would be tried again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            print(f"{name or Path(sys.argv[0]).name}: {sentence(error)}", file=sys.stderr)
        return 1
    return code


def is_unwritten(error: Exception) -> bool:
    """Whether an error says that an output could not be written."""
    return isinstance(error, OSError) and error.errno in UNWRITTEN


def nearest(word: str, names: Iterable[str]) -> list[str]:
    """The names that begin with a word, else the most similar one, else none. Leading signs do not count."""
    bare = {name.lstrip("-/"): name for name in names}
    word = word.lstrip("-/").lower()
    begun = [known for known in bare if known.startswith(word)] if word else []
    return [bare[known] for known in begun or difflib.get_close_matches(word, bare, 1)]


def _choices(match: re.Match[str]) -> str:
    return f" must be one of {match[2].replace(chr(39), '')}, got {match[1]}"


def option_of(name: str) -> str:
    """The option of a parsed argument: --max-length for "max_length"."""
    return f"--{name.replace('_', '-')}"


def one_line(message: object) -> str:
    return " ".join(str(message).split())


def sentence(error: Exception) -> str:
    """An error's message on one line; for errors of the system or the hub, its first sentence."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, OSError):
        lines = text.splitlines()
        told = [line for line in lines if line and not re.match(r"Got: |\d{3} Client Error", line)] or lines
        text = re.split(r"(?<=\w)\. (?=[A-Z])", told[0])[0]
    return one_line(text).rstrip(".")


# --- Types of arguments: each reads a text, or says what the text must be.


def whole(least: int = 1, most: int = MAX_TOKENS) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"\s*[+-]?\d{1,19}\s*", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return read


def number(least: float, most: float) -> Callable[[str], float]:
    """A number from `least` to `most`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be a number from {least:g} to {most:g}, got {text!r}")
        return value

    return read


def sizes(most: int = MAX_TOKENS, least: int = 1) -> Callable[[str], list[int]]:
    """Whole numbers from `least` to `most`, separated by commas."""
    return _list_of(whole(least, most), f"whole numbers from {least} to {most}")


def numbers(least: float, most: float) -> Callable[[str], list[float]]:
    """Numbers from `least` to `most`, separated by commas, without repetitions."""
    read = _list_of(number(least, most), f"numbers from {least:g} to {most:g}")
    return lambda text: list(dict.fromkeys(read(text)))


def _list_of(read: Callable[[str], Number], what: str) -> Callable[[str], list[Number]]:
    def read_all(text: str) -> list[Number]:
        try:
            return [read(part) for part in text.split(",")]
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(f"must be {what}, separated by commas, got {text!r}") from None

    return read_all


def some_text(text: str) -> str:
    """A text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError(f"must be a text that is not empty, got {text!r}")
    return text


def device(text: str) -> str:
    """A device by its name. Whether it exists is not checked: only torch knows."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text):
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text!r}")
    return text


def model(text: str) -> str:
    """A directory that exists, or what may be a hub id."""
    path = os.path.expanduser(text)
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise argparse.ArgumentTypeError(f"must be a directory or a hub id, and {text} is a file")
    if _looks_local(text):
        raise argparse.ArgumentTypeError(f"must be a directory or a hub id, and {text} does not exist")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"must be a directory or a hub id, and {text!r} is neither (a hub id is NAME or OWNER/NAME)"
        )
    return text


def _looks_local(text: str) -> bool:
    separators = tuple(filter(None, (os.sep, os.altsep)))
    local = text.startswith((".", "~", *separators)) or text.endswith(separators)
    return local or os.path.isdir(os.path.dirname(text))


def existing_file(text: str) -> Path:
    """A file that can be read."""
    return _existing(text, os.path.isfile, "file", "is a directory" if os.path.isdir(text) else "is a device or pipe")


def existing_directory(text: str) -> Path:
    """A directory."""
    return _existing(text, os.path.isdir, "directory", "is a file")


def _existing(text: str, exists: Callable[[str], bool], what: str, otherwise: str) -> Path:
    if not exists(text):
        why = otherwise if os.path.exists(text) else "does not exist"
        raise argparse.ArgumentTypeError(f"must be a {what}, and {text or 'an empty path'} {why}")
    return Path(text)


def new_directory(text: str) -> Path:
    """A directory that does not exist yet, or is empty. Nothing is created."""
    path = Path(text)
    if not text or (path.exists() and not path.is_dir()):
        raise argparse.ArgumentTypeError(f"must be a new or empty directory, and {text or 'an empty path'} is not one")
    if path.is_dir() and any(path.iterdir()):
        raise argparse.ArgumentTypeError(f"must be a new or empty directory, and {text} is not empty")
    place = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    with _refused(f"must be a directory that can be made: {place}"):
        try_to_write_into(place)
    return path


def output_directory(text: str) -> Path:
    """A directory that can be written into, or made in one that exists. Nothing is created."""
    path = Path(text)
    if not text or (path.exists() and not path.is_dir()):
        raise argparse.ArgumentTypeError(f"must be a directory, and {text or 'an empty path'} is not one")
    place = path.absolute() if path.is_dir() else path.absolute().parent
    if not place.is_dir():
        raise argparse.ArgumentTypeError(f"must be in a directory that exists, and {place} does not")
    with _refused(f"must be a directory that can be written, and {text} cannot"):
        try_to_write_into(place)
    return path


def output_file(*suffixes: str) -> Callable[[str], Path]:
    """A file that can be written, with one of the suffixes if some are given. Nothing is created."""

    def read(text: str) -> Path:
        path = Path(text)
        folder = path.absolute().parent
        if not text or os.path.isdir(text):
            raise argparse.ArgumentTypeError(f"must be a file, and {text or 'an empty path'} is not one")
        if suffixes and path.suffix.lower() not in suffixes:
            raise argparse.ArgumentTypeError(f"must end with {' or '.join(suffixes)}, got {text!r}")
        if not os.path.isdir(folder):
            raise argparse.ArgumentTypeError(f"must be a file in a directory that exists, and {folder} does not")
        with _refused(f"must be a file that can be written, and {text} cannot"):
            if path.is_file():
                open(path, "ab").close()  # changes nothing
            elif not path.exists():
                try_to_write_into(folder)
        return path

    return read


@contextmanager
def _refused(sentence: str) -> Iterator[None]:
    """Turn an OSError inside the block into argparse's error: a sentence, and the reason."""
    try:
        yield
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{sentence}: {error.strerror}") from None


def try_to_write_into(directory: Path) -> None:
    """Raise OSError if no file can be made in a directory. Its permissions alone do not say so."""
    with tempfile.TemporaryFile(dir=directory):
        pass


# --- Arguments and checks that several scripts share.


def add_device(
    parser: argparse.ArgumentParser,
    dtype: str | None = None,
    dtype_help: str = "default: float32 on a CPU, else the checkpoint's",
) -> None:
    """--device and --dtype; dtype: the default."""
    shown = "cpu, cuda or cuda:N (default: a GPU if there is one)"
    parser.add_argument("--device", type=device, metavar="NAME", help=shown)
    parser.add_argument("--dtype", choices=DTYPES, default=dtype, help=dtype_help)


def add_drafting_models(parser: argparse.ArgumentParser, target: bool = False) -> None:
    """Arguments for the draft of a target: a smaller model, a head, or a block drafter; with `target` for it too."""
    if target:
        shown = "default: demo, the embedded one"
        parser.add_argument("--target", type=model, default=PAIR, metavar="PATH_OR_ID", help=shown)
    for option, shown in {
        "--drafter": "a smaller model with the same vocabulary (default: the demo's)",
        "--head": "an EAGLE head (default: the target's)",
        "--block-drafter": "default: demo-block for the demo",
    }.items():
        parser.add_argument(option, type=model, metavar="PATH_OR_ID", help=shown)


def holds_target(directory: str) -> bool:
    """Whether a directory, or "demo", has a target next to its heads."""
    return (Path(path_of(directory)) / "target" / "config.json").is_file()


def check_model(parser: argparse.ArgumentParser, target: str, draft: str | None) -> None:
    """Refuse a target without a head, and the demo with a head of another model."""
    if draft in BLOCKS:
        parser.error(f"--draft must be an EAGLE head here, and {draft} is a block drafter")
    if draft is not None:
        if target == PAIR:
            parser.error("--draft must come with the --model that it drafts for: the demo has heads of its own")
    elif not holds_target(target):
        here = "was not saved with one" if Path(target).is_dir() else "is not a directory here"
        parser.error(f"--draft must name the head (a directory or a hub id) for --model {target}, which {here}")


def gpus() -> int | None:
    """The number of GPUs that NVIDIA's driver shows this process; None with AMD's driver, which only torch can ask."""
    if os.path.exists("/dev/kfd"):
        return None
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value


def check_device(parser: Parser, name: str | None, only_gpu: bool = False) -> None:
    """Refuse a GPU where there is none, and with `only_gpu` the CPU. torch is not asked, and may refuse more."""
    if only_gpu and name == "cpu":
        parser.error("--device must be a GPU in this mode, got cpu")
    if gpus() != 0 or (not only_gpu and name in (None, "cpu")):
        return
    if name is None:
        parser.stop("this needs a GPU, and there is none here")
    parser.error(f"--device must be cpu, because there is no GPU here, got {name}")


def check_outputs(parser: argparse.ArgumentParser, **paths: Path | None) -> None:
    """Refuse two files that are one, by whatever path, and pictures without matplotlib."""
    seen: dict[Path, str] = {}
    for name, path in paths.items():
        if path is None:
            continue
        first = seen.setdefault(path.resolve(), name)
        if first != name:
            parser.error(f"--{name} must be another file than --{first}, got {str(path)!r}, which is the same")
    if paths.get("plot") and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")


def stored_positions(target: str) -> int | None:
    """The number of positions in the configuration of a model on this disk; None if unknown. With longrope: as far as
    the short factors go."""
    root = Path(path_of(target))
    for file in (root / "target" / "config.json", root / "config.json"):
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            positions = config.get("max_position_embeddings")
            rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
            if "longrope" in (rope.get("rope_type"), rope.get("type")):
                name = "original_max_position_embeddings"
                positions = rope.get(name) or config.get(name, positions)
        except (OSError, ValueError, AttributeError):  # loading the model will say what is wrong
            continue
        return positions if isinstance(positions, int) else None
    return None


def too_long(what: str, tokens: int, new: int, positions: int | None) -> str | None:
    """A sentence if a prompt and its new tokens need more than the model's positions; None if they fit."""
    if positions is None or tokens + new <= positions:
        return None
    return f"{what} and the new tokens must fit into the model's {positions} positions, got {tokens} + {new} tokens"


def new_too_many(new: int, positions: int | None) -> str | None:
    """The same for --max-length that leaves no room for a prompt."""
    if positions is None or new < positions:
        return None
    return f"--max-length must be below the model's {positions} positions, got {new}"
