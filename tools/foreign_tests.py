"""Run other people's tests over models that this package decodes, and count what its engine ran.

    python tools/foreign_tests.py generation --source ~/transformers
    python tools/foreign_tests.py families --source ~/transformers --silu --plain-masks
    python tools/foreign_tests.py safeailab --source ~/EAGLE

`generation` and the families (`llama`, `mistral`, `qwen2`, `qwen3`, or `families` for all four) are transformers' own
tests. Each runs twice: as it is, and with every model optimised by `optimize_with_triton` during each call of
`generate`. A test that passes only as it is counts as a regression. The table also says how many of these calls the
engine ran, how many the original ran, and why. A suite that passes because nothing ran on the engine proves nothing.

The other suites hold our replacements against the code that they replace: `safeailab` and `eagle-llm` (an EaModel
decoded by its own methods and by ours), `sglang` (its modules with our kernels), `arctic` (its suffix tree).

The exit status is 1 after a regression, and where no test or no call of the engine ran.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_triton.command_line import Parser, existing_directory, option_of, output_file, run_program, some_text

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
THREAD_SECONDS = 30  # that a test's threads may go on after it
QUIETLY = ("-q", "--no-header", "--tb=short", "--disable-warnings", "--continue-on-collection-errors")
OPTIONS = "EAGLE_TRITON_FOREIGN_TESTS"  # names the file that tells the child what to do
TRANSFORMERS = (
    "a checkout of transformers at the version that is installed:\n"
    "git clone --depth 1 --branch v{version} https://github.com/huggingface/transformers\n"
    "its tests need `pip install parameterized datasets`"
)


class Comparison(NamedTuple):
    """Tests of ours that hold this package against code which is not in the repository."""

    tests: str
    variable: str | None  # the environment variable that tells these tests where the source is
    where: str


COMPARISONS = {
    "safeailab": Comparison(
        "tests/upstream/test_safeailab.py",
        "EAGLE_SRC",
        "git clone https://github.com/SafeAILab/EAGLE; it needs transformers 4.53 (constraints-upstream.txt)",
    ),
    "eagle-llm": Comparison(
        "tests/upstream/test_eagle_llm.py", None, "pip install eagle-llm==1.2.1; it needs transformers 4.53"
    ),
    "sglang": Comparison("tests/upstream/test_sglang.py", None, "pip install sglang (0.5.13 or 0.5.23)"),
    "arctic": Comparison(
        "tests/test_arctic.py",
        "ARCTIC_C",
        "the folder where csrc/suffix_decoding of https://github.com/snowflakedb/ArcticInference was built",
    ),
}


def main(argv: list[str] | None = None) -> int:
    parser = Parser("foreign_tests.py", __doc__ or "")
    add = parser.add_argument
    add("suite", choices=("generation", "families", *FAMILIES, *COMPARISONS), help="which tests")
    add("--source", type=existing_directory, metavar="DIR", help="where their source is; without it the command says")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--plain", action="store_true", help="only run the tests as they are")
    ways.add_argument("--wrap", action="store_true", help="only run the tests over optimised models")
    add("--draft", choices=("none", "suffix", "ngram"), default="suffix", help="of optimised models (default: suffix)")
    add("--silu", action="store_true", help="give the families' small models SiLU, where their tests choose GELU")
    add(
        "--plain-masks", action="store_true", help="give them masks without holes, where their tests choose random ones"
    )
    stand_ins = "models and tokenizers of the hub become small random ones, so that tests run without the hub"
    add("--stand-ins", action="store_true", help=stand_ins)
    add("-k", type=some_text, dest="expression", metavar="EXPRESSION", help="only tests that match, as pytest reads it")
    add("--output", type=output_file(), metavar="FILE.json", help="write outcomes and counts there")
    args = parser.parse_args(argv)
    if args.suite in COMPARISONS:
        return _run_comparison(parser, args)
    with parser.explains():
        import transformers
    if args.source is None:
        parser.stop(f"{args.suite} needs --source: {TRANSFORMERS.format(version=transformers.__version__)}")
    paths = _paths(args.suite)
    if missing := [path for path in paths if not (args.source / path).exists()]:
        parser.stop(
            f"--source {args.source} has no {missing[0]}: {TRANSFORMERS.format(version=transformers.__version__)}"
        )
    options = {
        "draft": None if args.draft == "none" else args.draft,
        "silu": args.silu,
        "plain_masks": args.plain_masks,
        "stand_ins": args.stand_ins,
        "only_generation": args.suite != "generation",
    }
    ways_run = ["plain"] * (not args.wrap) + ["wrapped"] * (not args.plain)
    found: dict[str, dict[str, Any]] = {}
    for way in ways_run:
        only = [test for tests in found.values() for test, result in tests.items() if result["calls"]]
        found[way] = _run(args.source, paths, args.expression, options | {"wrap": way == "wrapped", "only": only})
    summary = summarise(found)
    print(report(args.suite, summary))
    if args.output:
        versions = {"transformers": transformers.__version__}
        record = {"suite": args.suite, **versions, "options": options, "summary": summary, "found": found}
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    return int(bool(summary["regressions"]) or ("wrapped" in found and not summary["calls"]["engine"]))


def _paths(suite: str) -> list[str]:
    if suite == "generation":
        return ["tests/generation"]
    families = FAMILIES if suite == "families" else (suite,)
    return [f"tests/models/{family}/test_modeling_{family}.py" for family in families]


def _run(source: Path, paths: list[str], expression: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Run pytest in another process, with this file as a plugin. Returns the outcome and the calls of each test."""
    with tempfile.TemporaryDirectory() as folder:
        told, answer = Path(folder) / "options.json", Path(folder) / "found.json"
        told.write_text(json.dumps(options | {"answer": str(answer)}))
        command = [sys.executable, "-m", "pytest", *paths, *QUIETLY]
        command += ["-p", "no:cacheprovider", "-p", "tools.foreign_tests"]
        command += ["-k", expression] if expression else []
        places = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {OPTIONS: str(told), "PYTHONPATH": os.pathsep.join(filter(None, places))}
        if options["stand_ins"]:
            environment["HF_HUB_OFFLINE"] = "1"
        subprocess.run(command, cwd=source, env=environment, check=False)
        if not answer.exists():
            raise SystemExit("foreign_tests.py: pytest ended before it had run a test; what it said stands above")
        return json.loads(answer.read_text())


def summarise(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Counts over the tests that call `generate`; calls are counted in tests that pass as they are."""
    generating = {test for tests in found.values() for test, result in tests.items() if result["calls"]}
    passed = {
        way: {test for test in generating if tests.get(test, {}).get("outcome") == "passed"}
        for way, tests in found.items()
    }
    calls: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for test in passed.get("plain", generating):
        for where, reason in found.get("wrapped", {}).get(test, {"calls": []})["calls"]:
            calls[where] += 1
            if reason:
                reasons[f"{where}: {reason}"] += 1
    both = len(passed) == 2
    return {
        "tests": len(generating),
        "passed": {way: len(tests) for way, tests in passed.items()},
        "regressions": sorted(passed["plain"] - passed["wrapped"]) if both else [],
        "calls": {where: calls[where] for where in ("engine", "original", "refused", "raised")},
        "reasons": dict(reasons.most_common()),
    }


def report(suite: str, summary: dict[str, Any]) -> str:
    """The table, and below it the reasons and the regressions."""
    calls, passed = summary["calls"], summary["passed"]
    total = calls["engine"] + calls["original"] + calls["refused"]  # what raised has run on neither
    share = f"{calls['engine'] / total:.0%}" if total else "n/a"
    row = {"suite": suite, "tests": summary["tests"]}
    row |= {way: passed.get(way, "-") for way in ("plain", "wrapped")} | {"regressions": len(summary["regressions"])}
    row |= {"calls": total + calls["raised"], "engine": calls["engine"], "share": share}
    row |= {where: calls[where] for where in ("original", "refused", "raised")}
    lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in (row, ["---"] * len(row), row.values())]
    lines += ["", *(f"{count:6d}  {reason}" for reason, count in summary["reasons"].items())]
    return "\n".join(["", *lines, *(f"REGRESSION: {test}" for test in summary["regressions"])])


def _run_comparison(parser: Parser, args: Any) -> int:
    """Tests of ours against foreign code, which skip where that is missing: then nothing is proven."""
    for name in ("plain", "wrap", "silu", "plain_masks", "stand_ins", "output"):
        if getattr(args, name):
            parser.error(f"{option_of(name)} is for transformers' tests, not for {args.suite}")
    comparison = COMPARISONS[args.suite]
    environment = dict(os.environ)
    if comparison.variable is not None:
        if args.source is None:
            parser.stop(f"{args.suite} needs --source: {comparison.where}")
        environment[comparison.variable] = str(args.source)
    elif args.source is not None:
        parser.error(f"--source: {args.suite} is found where it is installed ({comparison.where})")
    command = [sys.executable, "-m", "pytest", comparison.tests, "-q", "-rs"]
    command += ["-k", args.expression] if args.expression else []
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="")
    if not re.search(r"\b\d+ passed", done.stdout):
        parser.stop(f"no test of {args.suite} passed: {comparison.where}")
    return done.returncode


# --- From here on: the pytest plugin, which runs in the process of the foreign tests.


class _Plugin:
    """Counts the calls of `generate` of each test, and optimises models for them if told to."""

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self.found: dict[str, dict[str, Any]] = {}
        self.test: dict[str, Any] | None = None
        self.inside = False  # a call of generate: those that it makes by itself are not counted

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        if self.options["only_generation"]:
            kept = [item for item in items if _from_generation_tester(item)]
            config.hook.pytest_deselected(items=[item for item in items if item not in kept])
            items[:] = kept
        if only := set(self.options["only"]):  # those that called generate as they are
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in only])
            items[:] = [item for item in items if item.nodeid in only]
        if self.options["plain_masks"]:
            for tests in {base for item in items for base in getattr(item.cls, "__mro__", ())}:
                if _is_generation_tester(tests):
                    _adapt(tests, "prepare_config_and_inputs_for_generate", _with_plain_mask)
        if self.options["silu"]:
            for tester in {getattr(item.cls, "model_tester_class", None) for item in items} - {None}:
                _adapt(tester, "get_config", _with_silu)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test = self.found.setdefault(nodeid, {"outcome": "passed", "calls": []})

    def pytest_runtest_teardown(self) -> None:
        """A call that a thread of a test still makes is that test's."""
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join(THREAD_SECONDS)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome != "passed" and self.found[report.nodeid]["outcome"] != "failed":
            self.found[report.nodeid]["outcome"] = report.outcome

    def pytest_sessionfinish(self) -> None:
        Path(self.options["answer"]).write_text(json.dumps(self.found))

    def wrap(self) -> None:
        """Put the counting `generate` in the place of transformers'."""
        import functools

        from transformers import GenerationMixin, PreTrainedModel

        original = GenerationMixin.generate

        @functools.wraps(original)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self.inside or self.test is None or not isinstance(model, PreTrainedModel):
                return original(model, *args, **kwargs)  # the second time, from inside this call
            with self._one_call():
                if not self.options["wrap"]:
                    self.test["calls"].append(["original", ""])
                    return original(model, *args, **kwargs)
                return self._optimised(original, model, args, kwargs)

        GenerationMixin.generate = generate

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def _optimised(self, original: Any, model: Any, args: Any, kwargs: Any) -> Any:
        """One call of an optimised model, restored afterwards. Tests change and copy their models between calls."""
        from eagle_triton import UnsupportedModelError, optimize_with_triton

        assert self.test is not None
        try:
            _, originals = optimize_with_triton(model, self.options["draft"])
        except UnsupportedModelError as refusal:
            self.test["calls"].append(["refused", re.sub(r"\d+", "N", str(refusal))])
            return original(model, *args, **kwargs)
        where = ["raised", ""]
        try:
            result = model.generate(*args, **kwargs)
            row = originals.report()[0]
            where = ["original", without_values(row.reason)] if row.fallbacks else ["engine", ""]
            return result
        except Exception as error:
            where = ["raised", type(error).__name__]
            raise
        finally:
            self.test["calls"].append(where)
            originals.restore()


def _adapt(owner: Any, name: str, change: Callable[[Any], None]) -> None:
    """Change in place all that a method of a class returns."""
    method = getattr(owner, name)

    def adapted(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        change(result)
        return result

    setattr(owner, name, adapted)


def _with_silu(config: Any) -> None:
    config.hidden_act = "silu"


def _with_plain_mask(config_and_inputs: tuple[Any, dict[str, Any]]) -> None:
    _, inputs = config_and_inputs
    if (mask := inputs.get("attention_mask")) is not None:
        inputs["attention_mask"] = mask.new_ones(mask.shape)


def without_values(reason: str) -> str:
    """A reason without the values of its call, so that alike ones are counted together."""
    return re.sub(r"\d+", "N", re.sub(r"(\w)=[^;,]*", r"\1", re.sub(r"\[[\d, ]*\]", "[...]", reason)))


def _is_generation_tester(tester: type) -> bool:
    return tester.__name__ == "GenerationTesterMixin"


def _from_generation_tester(item: Any) -> bool:
    """Whether a test of a family is one of the tests of generation that all families share."""
    bases = getattr(item.cls, "__mro__", ())
    name = getattr(item, "originalname", item.name)
    return any(_is_generation_tester(base) and name in vars(base) for base in bases)


def _stand_in_for_the_hub() -> None:
    """Small random models and a tokenizer of letters where tests load something by its name on the hub."""
    import transformers
    from transformers import PreTrainedModel

    def names_hub(name: Any) -> bool:
        return isinstance(name, str) and not os.path.isdir(name)

    load_model = PreTrainedModel.from_pretrained.__func__
    load_any = transformers.AutoModelForCausalLM.from_pretrained.__func__
    load_tokenizer = transformers.AutoTokenizer.from_pretrained.__func__

    def model_of(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        known = [family for family in FAMILIES if cls.__name__.lower() == f"{family}forcausallm"]
        return _small_model(known[0]) if names_hub(name) and known else load_model(cls, name, *args, **kwargs)

    def any_model(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if not names_hub(name):
            return load_any(cls, name, *args, **kwargs)
        return _small_model("mistral" if "mistral" in name.lower() else "llama")

    def tokenizer(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if not names_hub(name):
            return load_tokenizer(cls, name, *args, **kwargs)
        options = {key: kwargs[key] for key in ("padding_side",) if key in kwargs}
        special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
        return letter_tokenizer([*special.values(), *LETTERS], **special, **options)

    PreTrainedModel.from_pretrained = classmethod(model_of)
    transformers.AutoModelForCausalLM.from_pretrained = classmethod(any_model)
    transformers.AutoTokenizer.from_pretrained = classmethod(tokenizer)


LETTERS = [chr(code) for code in range(32, 127)] + ["\n"]


def _small_model(family: str) -> Any:
    import torch
    import transformers

    name = family.capitalize()
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(LETTERS) + 3, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def letter_tokenizer(tokens: Iterable[str], **options: Any) -> Any:
    """A tokenizer with a token for each letter. Others are blanks. options: of transformers."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=" "))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, **options)


def pytest_configure(config: Any) -> None:
    """Become a plugin of the process that `_run` has started."""
    options = json.loads(Path(os.environ[OPTIONS]).read_text())
    if options["stand_ins"]:
        _stand_in_for_the_hub()
    plugin = _Plugin(options)
    plugin.wrap()
    config.pluginmanager.register(plugin, "eagle_triton_foreign_tests")


if __name__ == "__main__":
    sys.exit(run_program(main))
