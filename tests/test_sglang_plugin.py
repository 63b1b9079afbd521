"""Our kernels in the places of SGLang's, by modules of its names: both versions, every device, and the way back."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle_triton import sglang_plugin
from eagle_triton.patching import PatchError
from eagle_triton.reference import integrators as reference
from eagle_triton.sglang_plugin import patch_sglang, register, replacements
from tests import sglang_stub
from tests.test_integrators import assert_same, drafted, walk_case

VERSIONS = ("0.5.13", "0.5.23")
DEVICES = ("cuda", "hip", "xpu", "cpu")
K, DEPTH, NODES, BATCH = 3, 4, 8, 2


def every(modules) -> dict[str, dict]:
    return {name: dict(vars(module)) for name, module in vars(modules).items()}


def assert_untouched(modules, before):
    """The very objects, and no name more."""
    for name, module in vars(modules).items():
        now = vars(module)
        assert now.keys() == before[name].keys()
        assert all(now[key] is value for key, value in before[name].items()), name


def tree(seed=0):
    parent_list, chosen = drafted(BATCH, K, DEPTH, NODES, seed)
    return torch.tensor([7, 9]), parent_list, chosen, chosen + 100, torch.tensor([3, 5])


def job(greedy, rejection=False, vocabulary=9):
    candidates, links, target, source = walk_case(3, BATCH, K, DEPTH, NODES, vocabulary)
    logits = torch.randn(BATCH * NODES, vocabulary, generator=source)
    logits[torch.arange(BATCH * NODES), target.flatten()] += 2
    coins, final = torch.rand(BATCH, NODES, generator=source), torch.rand(BATCH, generator=source)
    return SimpleNamespace(
        greedy=greedy, rejection=rejection, topk=K, nodes=NODES, batch=BATCH, width=DEPTH + 1, logits=logits,
        candidates=candidates, links=links, coins=coins, final=final, temperatures=torch.tensor([0.7, 1.5]),
        top_ks=torch.tensor([4, 1 << 30]), top_ps=torch.tensor([1.0, 0.8]),
    )  # fmt: skip


def workers(modules):
    """The modules that verify, with the elements that predicts has beyond the nodes."""
    if hasattr(modules, "eagle_info"):
        return [
            (modules.eagle_info, 1, DEPTH + 1),
            (modules.eagle_info_v2, 0, DEPTH + 1),
            (modules.ngram_info, 1, NODES),
        ]
    return [(modules.eagle_utils, 0, DEPTH + 1)]


def expected_walk(work, spare, width, renormed):
    predicts = torch.full((BATCH * NODES + spare,), -7, dtype=torch.int32)
    accept_index = torch.full((BATCH, width), -1, dtype=torch.int32)
    outputs = (predicts, accept_index, torch.zeros(BATCH, dtype=torch.int32))
    tree_of = (predicts[: BATCH * NODES], *outputs[1:], work.candidates, *work.links)
    if work.greedy:
        reference.verify_tree_greedy_triton(*tree_of, work.logits.argmax(-1).view(BATCH, NODES))
        return outputs
    probs = torch.softmax(work.logits / work.temperatures.repeat_interleave(NODES)[:, None], dim=-1)
    if renormed:
        probs = replacements.top_k_renorm_prob(probs, work.top_ks.repeat_interleave(NODES))
        probs = replacements.top_p_renorm_prob(probs, work.top_ps.repeat_interleave(NODES))
    probs = probs.view(BATCH, NODES, -1)
    reference.tree_speculative_sampling_target_only(*tree_of, work.coins, work.final, probs, torch.zeros_like(probs))
    return outputs


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("version", VERSIONS)
def test_restore_gives_back_the_very_objects(monkeypatch, version, kind):
    modules = sglang_stub.install(monkeypatch, version, kind)
    before = every(modules)
    originals = patch_sglang()
    assert every(modules) != before
    with pytest.raises(PatchError, match="already"):
        patch_sglang()
    originals.restore()
    assert_untouched(modules, before)
    with pytest.raises(ZeroDivisionError), patch_sglang():
        raise ZeroDivisionError
    assert_untouched(modules, before)


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["full", "tree", "packed"])
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("version", VERSIONS)
def test_build(monkeypatch, version, kind, mode):
    modules = sglang_stub.install(monkeypatch, version, kind)
    root, parent_list, chosen, tokens, lengths = tree()
    shape = (K, DEPTH, NODES, mode)
    arguments = (root, parent_list, chosen, tokens, lengths)
    expected = reference.build_tree_efficient_triton(*arguments, int(lengths.sum()), *shape)
    with patch_sglang() as originals:
        build = modules.eagle_utils.build_tree_kernel_efficient
        assert_same(build(*arguments, 8, *shape), expected)
        buffer = torch.zeros(999, dtype=torch.uint8) if mode < 2 or NODES <= 8 else None
        mask, *rest = build(*arguments, 0, *shape, tree_mask_buf=buffer)  # as with a buffer: without the sum of lengths
        assert mask is buffer and torch.equal(mask[: len(expected[0])], expected[0].view(torch.uint8))
        assert_same(rest, expected[1:])
        if version == "0.5.13":
            positions = torch.full((99,), -5)
            assert build(*arguments, 8, *shape, position_buf=positions)[1] is positions
            assert torch.equal(positions[: BATCH * NODES], expected[1]) and (positions[BATCH * NODES :] == -5).all()
        else:
            buffer.fill_(0)
            build(*arguments, 0, *shape, tree_mask_buf=buffer, fill_prefix_mask=False)
            if mode == 0:
                rows = buffer[: NODES * (3 + NODES)].view(NODES, -1)
                assert not rows[:, :3].any()  # the prefix is the caller's
                assert torch.equal(rows[:, 3:].bool(), expected[0][: rows.numel()].view(NODES, -1)[:, 3:])
        name = next(path for path in originals if "build" in path)
        assert next(patch_point.calls for patch_point in originals.report() if patch_point.path == name) == 3
    with pytest.raises((sglang_stub.Theirs, NameError)):
        build(*arguments, 8, *shape)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("version", VERSIONS)
def test_verify(monkeypatch, version, kind, greedy):
    """Sampled trees are sampled on every device, by the filtered distribution."""
    modules = sglang_stub.install(monkeypatch, version, kind)
    own_renorm = kind == "cuda" or (version == "0.5.23" and kind == "hip")
    work = job(greedy)
    for module, spare, width in workers(modules):
        expected = expected_walk(work, spare, width, not own_renorm)
        with patch_sglang() as originals:
            assert_same(module.verify(work), expected)
            assert any(patch_point.calls for patch_point in originals.report() if "verification" in patch_point.feature)
        with pytest.raises((sglang_stub.Theirs, NameError, TypeError)):  # theirs again, or none on this device
            module.verify(work)


def test_sampled_and_greedy_walks_differ():
    """Else a fallback to the argmax would pass."""
    sampled, greedy = (expected_walk(job(value), 0, DEPTH + 1, True) for value in (False, True))
    assert not torch.equal(sampled[0], greedy[0])


def test_rejection_sampling_of_chains_stays_sglangs_own(monkeypatch):
    modules = sglang_stub.install(monkeypatch, "0.5.23", "hip")
    with patch_sglang(), pytest.raises(sglang_stub.Theirs):
        modules.eagle_utils.verify(job(False, rejection=True))
    modules = sglang_stub.install(monkeypatch, "0.5.23", "xpu")
    with patch_sglang() as originals:
        modules.eagle_utils.verify(job(False, rejection=True))
        assert originals.report()[1].calls == 1  # greedy, as SGLang decides it there


def test_what_is_left_to_sglang_is_reported(monkeypatch):
    for kind, left in (("cuda", []), ("hip", ["sglang.srt.speculative.dflash_utils." + replacements.SAMPLING_KERNEL])):
        sglang_stub.install(monkeypatch, "0.5.23", kind)
        with patch_sglang() as originals:
            assert [patch_point.path for patch_point in originals.report() if patch_point.status == "left"] == left


@pytest.mark.parametrize("version", ["0.5.12", "0.5.14", "0.5.23.dev1", "0.6.0"])
def test_unknown_versions_are_refused(monkeypatch, version):
    modules = sglang_stub.install(monkeypatch, version, "cuda")
    before = every(modules)
    with pytest.raises(PatchError, match=rf"0\.5\.13 or 0\.5\.23 .*, got {version};"):
        patch_sglang()
    assert_untouched(modules, before)


def test_a_local_build_of_a_known_version_is_known(monkeypatch):
    sglang_stub.install(monkeypatch, "0.5.13+rocm700", "hip")
    patch_sglang().restore()


NAMES = [
    ("0.5.13", "eagle_utils", "build_tree_kernel_efficient"),
    ("0.5.13", "eagle_utils", "sgl_build_tree_kernel_efficient"),
    ("0.5.13", "eagle_utils", "verify_tree_greedy_func"),
    ("0.5.13", "eagle_info", "verify_tree_greedy_func"),
    ("0.5.13", "eagle_info", "top_k_renorm_prob"),
    ("0.5.13", "eagle_info", "TREE_SPEC_KERNEL_AVAILABLE"),
    ("0.5.13", "eagle_info_v2", "_is_hip"),
    ("0.5.13", "eagle_info_v2", replacements.SAMPLING_KERNEL),
    ("0.5.13", "ngram_info", "verify_tree_greedy"),
    ("0.5.13", "dflash_utils", replacements.SAMPLING_KERNEL),
    ("0.5.23", "eagle_utils", "build_tree_kernel_efficient_func"),
    ("0.5.23", "eagle_utils", "verify_tree_greedy_func"),
    ("0.5.23", "eagle_utils", "_verify_uses_greedy"),
    ("0.5.23", "eagle_utils", "top_p_renorm_prob"),
    ("0.5.23", "eagle_utils", replacements.SAMPLING_KERNEL),
    ("0.5.23", "dflash_utils", replacements.SAMPLING_KERNEL),
]


@pytest.mark.parametrize(("version", "leaf", "name"), NAMES)
def test_a_module_without_a_name_is_refused(monkeypatch, version, leaf, name):
    modules = sglang_stub.install(monkeypatch, version, "cuda")
    delattr(getattr(modules, leaf), name)
    before = every(modules)
    with pytest.raises(PatchError, match=f"{leaf}.{name} does not exist"):
        patch_sglang()
    assert_untouched(modules, before)


@pytest.mark.parametrize("kind", ["npu", "musa"])
@pytest.mark.parametrize("version", VERSIONS)
def test_devices_without_kernels_are_refused(monkeypatch, version, kind):
    modules = sglang_stub.install(monkeypatch, version, kind)
    before = every(modules)
    with pytest.raises(PatchError, match=kind.upper()):
        patch_sglang()
    assert_untouched(modules, before)


@pytest.mark.parametrize("asked", [None, "", "another", "eagle", "another, eagle_triton", "eagle_triton"])
def test_the_entry_point_waits_to_be_asked(monkeypatch, asked):
    modules = sglang_stub.install(monkeypatch, "0.5.23", "cuda")
    before = every(modules)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    if asked is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", asked)
    register()
    if asked and "eagle_triton" in asked:
        assert modules.eagle_utils.verify_tree_greedy_func.__name__ == "verify_tree_greedy"
    else:
        assert_untouched(modules, before)


def test_the_entry_point_is_declared_and_light():
    tomllib = pytest.importorskip("tomllib")
    root = Path(__file__).resolve().parents[1]
    groups = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    (name, value), *others = groups["sglang.srt.plugins"].items()
    assert name == sglang_plugin.NAME and not others
    assert EntryPoint(name, value, "sglang.srt.plugins").load() is register
    code = (
        "import sys, eagle_triton.sglang_plugin as p; p.register(); assert not {'torch', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env={"PYTHONPATH": str(root)}, timeout=60)


def test_renormalising():
    probs = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.5, 0.2, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    out = replacements.top_k_renorm_prob(probs, torch.tensor([1, 2, 1 << 30]))
    torch.testing.assert_close(out, torch.tensor([[1, 0, 0, 0], [5 / 9, 2 / 9, 2 / 9, 0], [0.1, 0.2, 0.3, 0.4]]))
    out = replacements.top_p_renorm_prob(probs, torch.tensor([0.4, 0.6, 1.0]))
    torch.testing.assert_close(out, torch.tensor([[1, 0, 0, 0], [5 / 9, 2 / 9, 2 / 9, 0], [0.1, 0.2, 0.3, 0.4]]))
    out = replacements.top_p_renorm_prob(probs, torch.tensor([0.0, 0.5, 0.6]))
    torch.testing.assert_close(out, torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 3 / 7, 4 / 7]]))


def test_inputs_need_not_be_contiguous():
    _, parent_list, chosen, _, lengths = tree()
    loose = [torch.stack((value, value), dim=-1)[..., 0] for value in (parent_list, chosen, lengths)]
    assert not any(value.is_contiguous() for value in loose[:2])
    outputs = [
        (torch.zeros(BATCH * NODES**2, dtype=torch.bool), torch.zeros(BATCH * NODES, dtype=torch.int64),
         *torch.zeros(3, BATCH, NODES, dtype=torch.int64))
        for _ in range(2)
    ]  # fmt: skip
    replacements.build_tree(*loose, *outputs[0], K, DEPTH, NODES, 1)
    replacements.build_tree(parent_list, chosen, lengths, *outputs[1], K, DEPTH, NODES, 1)
    assert_same(*outputs)


@pytest.mark.parametrize("version", VERSIONS)
def test_one_step_with_an_empty_parent_list_of_floats(monkeypatch, version):
    modules = sglang_stub.install(monkeypatch, version, "cuda")
    chosen, lengths = torch.tensor([[0, 1]]), torch.tensor([4])
    with patch_sglang():
        _, positions, *links, tokens = modules.eagle_utils.build_tree_kernel_efficient(
            torch.tensor([7]), torch.empty(1, 0), chosen, chosen + 5, lengths, 4, 2, 1, 3
        )
    assert positions.tolist() == [4, 5, 5] and tokens.tolist() == [7, 5, 6]
    assert [link.tolist() for link in links] == [[[0, 1, 2]], [[1, -1, -1]], [[-1, 2, -1]]]
