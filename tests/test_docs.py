"""README, CONTRIBUTING and docs/: snippets run as they stand, what they print is what they say, links lead somewhere.

Every ```python block of a page runs, in order, in one namespace that begins empty. A block that cannot run here has
`<!-- not run: the reason -->` in front of it and is only compiled. A ```text block behind a ```python block is what it
prints. A table of options has `<!-- options: module.Class -->` in front of it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from eagle_triton.benchmarks import main as benchmark
from eagle_triton.engine.operations import Operations, operation_names
from eagle_triton.errors import UnsupportedModelError
from eagle_triton.inference import eagle_inference
from eagle_triton.sglang_plugin import patch_sglang
from tests import sglang_stub
from tools import results_page

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
OPTIONS = re.compile(r"<!-- options: (?P<name>[\w.]+) -->\n(?P<table>(?:\|.*\n)+)")
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    language: str
    code: str
    mark: str | None


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    return [Block(found["language"], found["code"], found["mark"]) for found in FENCE.finditer(read(page))]


def run(page: str, capsys: pytest.CaptureFixture | None = None) -> dict:
    """Execute a page's snippets; returns their names. With `capsys`, compares what they print."""
    names: dict = {"__name__": "__main__"}
    for number, block in enumerate(found := blocks(page)):
        if block.language != "python":
            continue
        code = compile(block.code, f"{page}, block {number}", "exec")
        if block.mark is not None:
            assert re.fullmatch(r"not run: \w.{9,}", block.mark), f"{page}: a block that does not run needs a reason"
            continue
        exec(code, names)
        if capsys is not None:
            printed = capsys.readouterr().out
            if number + 1 < len(found) and found[number + 1].language == "text":
                assert printed == found[number + 1].code
    return names


WITH_SNIPPETS = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]


@pytest.mark.parametrize(
    "page", [page for page in WITH_SNIPPETS if page not in ("docs/engine.md", "docs/integrators.md")]
)
def test_snippets_run_as_they_stand(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page, capsys)


def test_engine_page(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    measure = eagle_inference.measure_costs

    def measure_few(engine, trees, batches, context, steps, least):
        return measure(engine, trees, batches[:1], 16, 1, least)

    monkeypatch.setattr(eagle_inference, "measure_costs", measure_few)
    names = run("docs/engine.md")
    printed = capsys.readouterr().out
    assert re.search(r"Acceptance rate: \d+\.\d\d%\nSpeedup: n/a x\n", printed)
    assert len(re.findall(r"^[248] [\d.]+% accepted, tau [\d.]+, [\d.]+ x$", printed, re.MULTILINE)) == 3
    assert (tmp_path / "acceptance.png").exists()
    assert names["accepted"].shape[0] == 1 and names["accept_length"].item() >= 0


def test_integrators_page(device, monkeypatch, capsys):
    sglang_stub.install(monkeypatch, "0.5.23", "hip")
    names = run("docs/integrators.md")
    assert names["device"] == device
    assert names["accepted"].shape == (2,) and names["draft_tokens"].shape == (2, 4)
    assert "patched sglang.srt.speculative.eagle_utils." in capsys.readouterr().out and names["originals"].restored


def test_integrators_page_names_what_the_plugin_replaces(monkeypatch):
    """Every name of the table, and the versions."""
    page = read("docs/integrators.md")
    for version in ("0.5.13", "0.5.23"):
        assert page.count(version) > 1
        sglang_stub.install(monkeypatch, version, "xpu")
        with patch_sglang() as originals:
            for path in originals:
                leaf, name = path.split(".")[-2:]
                assert leaf in page and (name in page or name.endswith("renorm_prob") or name.startswith("sgl_")), path


@pytest.mark.parametrize(("page", "most"), [("README.md", 150), ("docs/structure.md", 120)])
def test_pages_that_are_read_first_are_short(page, most):
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= most


def test_the_readme_says_what_its_snippet_prints():
    languages = [block.language for block in blocks("README.md")]
    assert "text" in languages and languages[languages.index("text") - 1] == "python"


def tables_of_options() -> list[tuple[str, str, str]]:
    return [(page, found["name"], found["table"]) for page in PAGES for found in OPTIONS.finditer(read(page))]


@pytest.mark.parametrize(("page", "name", "table"), tables_of_options(), ids=lambda value: value.rpartition(".")[2])
def test_tables_of_options_name_all_with_their_defaults(page, name, table):
    module, _, config = name.rpartition(".")
    module = importlib.import_module(module)
    rows = [line.strip("|").split("|")[:2] for line in table.splitlines()[2:]]
    shown = {option.strip().strip("`"): default.strip().strip("`") for option, default in rows}
    defaults = {field.name: field.default for field in dataclasses.fields(getattr(module, config))}
    assert {option: eval(default, vars(module)) for option, default in shown.items()} == defaults, page


def test_all_configurations_have_a_table():
    configurations = {"EagleTritonConfig", "TritonConfig", "EAGLEConfig", "SpeculativeConfig"}
    assert {name.rpartition(".")[2] for _, name, _ in tables_of_options()} == configurations


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: str) -> set[str]:
    """What the forge makes of a page's headings, which the site's generator makes too."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", read(page), flags=re.DOTALL | re.MULTILINE), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_lead_somewhere(page):
    wrong = []
    for link in LINK.findall(without_code(read(page))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        name = target.resolve().relative_to(ROOT).as_posix() if target.exists() else None
        if name is None or (anchor and anchor not in anchors(name)):
            wrong.append(link)
        if page.startswith("docs/"):
            assert name is not None and name.startswith("docs/"), f"{page}: {link} leaves the site"
    assert not wrong


def test_limits_have_anchors_for_every_refusal():
    wanted = "families heads layer-types devices weights quantisation hooks adapters context threads batches arguments"
    assert set(wanted.split()) <= anchors("docs/limits.md")


def versions(name: str) -> set[str]:
    return set(re.findall(rf"^{re.escape(name)}==([\w.]+)", read("constraints.txt"), re.MULTILINE))


def test_pre_commit_has_the_versions_of_the_constraints():
    pinned = re.findall(r"\b([\w-]+)==([\w.]+)", read(".pre-commit-config.yaml"))
    known = [(name, version) for name, version in pinned if versions(name)]
    assert {"ruff", "import-linter", "mypy"} <= {name for name, _ in known}
    assert all(version in versions(name) for name, version in known)


def test_what_the_site_is_built_with_is_pinned():
    from tools import build_docs

    names = [re.match(r"[\w-]+", requirement).group() for requirement in build_docs.requirements()]
    assert "mkdocs-material" in names and all(versions(name) for name in names)


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"^ +- .*?(\S+\.md)(?: #.*)?$", read("mkdocs.yml"), re.MULTILINE))
    assert listed == {results_page.PAGE, *(page.removeprefix("docs/") for page in PAGES if page.startswith("docs/"))}


def test_the_page_of_results_shows_every_file_with_machine_commit_and_command():
    page = results_page.page()
    for path in (ROOT / "results").iterdir():
        if path.suffix == ".png":
            assert f"](results/{path.name})" in page
        elif not (path.suffix == ".csv" and path.with_suffix(".json").exists()):
            (part,) = re.findall(rf"^### {re.escape(path.name)}\n\n(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE)
            assert re.match(r"\S.+; commit (\w{7,}(\+changes)?|not recorded)", part) and "\n```sh\n" in part
            assert len(re.findall(r"^\| .*\|$", part, re.MULTILINE)) > 1, f"{path.name}: no rows"
    assert "tools/results_page.py" in read("mkdocs.yml") and not (ROOT / "docs" / results_page.PAGE).exists()


def records() -> list[Path]:
    return [path for path in sorted((ROOT / "results").glob("*.json")) if "mode" in json.loads(path.read_text())]


@pytest.mark.parametrize("path", records(), ids=lambda path: path.stem)
def test_the_command_of_a_file_gives_its_options(path, tmp_path, monkeypatch):
    record = json.loads(path.read_text())
    words = shlex.split(results_page.command(record))
    script = next(index for index, word in enumerate(words) if word.endswith(".py"))
    assert (words[:script] == ["torchrun", "--nproc-per-node", "2"]) == ("ranks" in path.stem)
    assert (ROOT / words[script]).exists()
    if record["mode"] not in benchmark.MODES:
        return
    monkeypatch.chdir(tmp_path)
    (tmp_path / "CHECKOUT").mkdir()
    _, args = benchmark._parse(words[script + 1 :])
    args.device = record["options"]["device"]
    benchmark._settle(args)
    for name, value in record["options"].items():
        if f"--{name.replace('_', '-')}" in benchmark.MODES[record["mode"]].options and value is not None:
            found = getattr(args, name)
            assert (found is not None if name == "upstream" and value else found or False) == (value or False), name


def test_the_command_of_a_script_gives_what_its_defaults_depend_on():
    options = {"model": "demo", "eagle1": False, "prompt": None, "dtype": "bfloat16", "max_length": 100, "num_runs": 5}
    options |= {"target_weights": "fp8", "device": "cpu"}
    command = results_page.command({"mode": "integration", "options": options, "notes": []})
    asked = "--dtype bfloat16 --max-length 100 --num-runs 5 --target-weights fp8 --device cpu"
    assert command == f"python integration_test.py {asked}"


def test_a_file_that_the_page_cannot_show_is_named(tmp_path):
    (tmp_path / "figures.txt").write_text("1")
    with pytest.raises(ValueError, match="figures.txt: only .json, .csv and the .png of a .json are known"):
        results_page.page(tmp_path)


def test_the_reference_has_every_public_name():
    """docs/api.md names what `import eagle_triton` and `eagle_triton.inference` offer, or the module it is in."""
    shown = set(re.findall(r"^::: (\S+)$", read("docs/api.md"), re.MULTILINE))
    for package in ("eagle_triton", "eagle_triton.inference"):
        tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
        block = next(node for node in tree.body if isinstance(node, ast.If))  # of type checkers
        homes = {alias.name: node.module for node in block.body for alias in node.names}
        assert len(homes) > 10
        assert not {name for name, home in homes.items() if not {f"{home}.{name}", home} & shown}


def test_every_operation_has_its_page():
    """The module of a stem is rendered on docs/operations.md, and named in docs/structure.md."""
    shown = re.findall(r"^::: eagle_triton\.(?:ops\.)?(\w+)", read("docs/operations.md"), re.MULTILINE)
    stems = {getattr(Operations, name).__module__.rpartition(".")[2] for name in operation_names()}
    assert stems == set(shown)
    assert all(re.search(rf"`{stem}(\.py|/)`", read("docs/structure.md")) for stem in stems)


def test_refusals_point_to_sections_that_limits_has():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "eagle_triton").rglob("*.py")]
    named = {section for source in sources for section in re.findall(r"limits\.md#([a-z-]+)", source)}
    raised = re.findall(r"UnsupportedModelError\((.*?)\n?\s*\)\n", "".join(sources), re.DOTALL)
    named |= {match[1] for text in raised if (match := re.search(r'", ?\n?\s*"([a-z-]+)",?$', text))}
    named.add(inspect.signature(UnsupportedModelError).parameters["section"].default)
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / "limits.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"hooks", "weights", "devices", "threads", "heads", "families", "layer-types"} <= named
    assert named <= {heading.lower().replace(" ", "-") for heading in headings}
