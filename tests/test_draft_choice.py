"""Which draft is meant, before anything is loaded, and what is loaded then."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from eagle_triton import EAGLEConfig
from eagle_triton.demo import path_of
from eagle_triton.draft_choice import NOTHING, OWN_HEAD, OWN_LAYERS, choose_at, choose_given
from eagle_triton.engine.drafts.repeats import RepeatDraft
from eagle_triton.inference import SpeculativeConfig
from eagle_triton.inference import load as loading
from eagle_triton.inference.load import choose_draft

PLAIN, WITH_HEAD = nn.Linear(1, 1), nn.Linear(1, 1)
WITH_HEAD.ea_layer = nn.Linear(1, 1)
EAGLE, DRAFT_MODEL = SpeculativeConfig("eagle"), SpeculativeConfig("draft_model")
HYBRID = SpeculativeConfig("hybrid", num_speculative_tokens=2)


def choice(draft, target, options=None, **config):
    return choose_draft(draft, target, EAGLEConfig(speculative=options, **config))[0]


@pytest.mark.parametrize(
    ("target", "options", "expected"),
    [
        ("demo", None, OWN_HEAD),
        ("demo", EAGLE, OWN_HEAD),
        ("demo", DRAFT_MODEL, NOTHING),
        ("demo", HYBRID, OWN_HEAD),
        ("demo", SpeculativeConfig("mtp"), OWN_LAYERS),
        ("demo", SpeculativeConfig("suffix"), NOTHING),
        ("demo-gdn", None, OWN_LAYERS),
        ("demo-gdn", HYBRID, OWN_LAYERS),
        ("demo-gdn", EAGLE, OWN_HEAD),
        ("demo-gdn", SpeculativeConfig("naive"), NOTHING),
        (WITH_HEAD, None, OWN_HEAD),
        (WITH_HEAD, HYBRID, OWN_HEAD),
        (WITH_HEAD, SpeculativeConfig("ngram"), NOTHING),
        (PLAIN, None, NOTHING),
        (PLAIN, HYBRID, OWN_LAYERS),
    ],
)
def test_what_comes_with_the_target(target, options, expected):
    assert choice(None, target, options) == expected


def test_suffix_drafts_share_a_tree_with_what_comes_with_the_target():
    for target, expected in (("demo", NOTHING), ("demo-gdn", OWN_LAYERS), (WITH_HEAD, OWN_HEAD)):
        assert choice(None, target, suffix_drafts=4) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (SpeculativeConfig("eagle", model="some/head"), ("head", "some/head")),
        (SpeculativeConfig("dflash", model="demo-block"), ("block drafter", path_of("demo-block"))),
        (SpeculativeConfig("draft_model", model="demo-draft"), ("model", path_of("demo-draft"))),
        (SpeculativeConfig("draft_model", model="demo"), ("model", path_of("demo", "target"))),
        (SpeculativeConfig("mtp", model="demo-gdn"), ("layers", path_of("demo-gdn"))),
        (SpeculativeConfig("hybrid", model="some/layers", num_speculative_tokens=2), ("layers", "some/layers")),
    ],
)
@pytest.mark.parametrize("target", ["demo", WITH_HEAD, PLAIN], ids=["path", "EaModel", "plain"])
def test_what_the_configuration_names(target, options, expected):
    assert choice(None, target, options) == expected
    with pytest.raises(ValueError, match="give the draft once: draft_model, or model="):
        choice(PLAIN, target, options)


def test_what_is_handed_in():
    assert choice(PLAIN, "demo", EAGLE) == ("in memory", PLAIN) and choice("mtp", PLAIN) == OWN_LAYERS
    assert choice("some/head", "demo") == ("head", "some/head")
    assert isinstance(choice("ngram", WITH_HEAD).place, RepeatDraft)
    found, config = choose_draft("suffix", WITH_HEAD, EAGLEConfig())
    assert found == NOTHING and config.suffix_drafts == 15
    with pytest.raises(ValueError, match="method suffix drafts without a model"):
        choice(PLAIN, "demo", SpeculativeConfig("suffix"))


@pytest.mark.parametrize("argument", ["draft", "draft_model"])
def test_a_draft_by_a_wrong_name_is_refused_by_its_argument(argument, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in ("target", "eagle3"):
        (tmp_path / "pair" / folder).mkdir(parents=True)
        (tmp_path / "pair" / folder / "config.json").write_text("{}")
    for draft, error, message in (
        ("sufix", ValueError, f"{argument} must be suffix, ngram, mtp, .* got 'sufix'"),
        (str(tmp_path / "missing"), FileNotFoundError, f"{argument}: .*missing' does not exist"),
        ("~nobody-here/head", FileNotFoundError, f"{argument}: '~nobody-here/head' does not exist"),
        (tmp_path / "pair", ValueError, f"{argument} is a directory with a target and its heads: .*eagle3"),
        (tmp_path / "file", ValueError, f"{argument}: expected a directory or a hub id, .*file' is a file"),
        ("ngram", ValueError, f'{argument}="ngram" cannot be combined with suffix_drafts=4: leave one of them out'),
    ):
        with pytest.raises(error, match=message):
            choose_given(draft, EAGLEConfig(suffix_drafts=4), argument)


def test_files_that_cannot_be_read_are_left_to_the_loader(tmp_path):
    """It names the draft."""
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    assert choose_at(tmp_path) == ("head", str(tmp_path)) and choose_at(tmp_path, "model") == ("model", str(tmp_path))


def test_a_target_by_its_hub_id_alone_comes_in_the_dtype_that_it_names(monkeypatch):
    """Where it is not put on a CPU, and whatever drafts without a model."""
    asked = {}

    def load(path, **options):
        asked.update(options, path=path)
        return nn.Linear(1, 1, device="meta")

    config = SimpleNamespace(dtype=torch.bfloat16)
    monkeypatch.setattr(loading, "read_target_config", lambda path, **options: config)
    monkeypatch.setattr(loading, "load_tokenizer", lambda path: "tokenizer")
    monkeypatch.setattr(loading, "load_target", load)
    for options in (EAGLEConfig(suffix_drafts=4), EAGLEConfig(speculative=SpeculativeConfig("ngram"))):
        found = loading.target_in_memory("some/model", NOTHING, options, torch.device("meta"), None)
        placed = dict(dtype=torch.bfloat16, device_map={"": torch.device("meta")})
        assert found[1] == "tokenizer" and asked == dict(engine=True, path="some/model", **placed)
