"""The names that are replaced in each version of SGLang, and the patch itself.

Replacements are as deep as names allow: SGLang's own functions still make masks, positions and tokens, with the
arguments of their version, and call our kernel where they called theirs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from eagle_triton import patching
from eagle_triton.patching import Originals, PatchError, PatchPoint
from eagle_triton.sglang_plugin import replacements
from eagle_triton.sglang_plugin.replacements import SAMPLING_KERNEL

_SPECULATIVE = "sglang.srt.speculative"
_BUILD, _GREEDY, _SAMPLED = "tree building", "greedy verification", "sampled verification"
_RENORM = {
    "top_k_renorm_prob": replacements.top_k_renorm_prob,
    "top_p_renorm_prob": replacements.top_p_renorm_prob,
}
_DFLASH = "SGLang has no sampled verification on this device: DFlash, which drafts chains, verifies greedily"


def patch() -> Originals:
    """See eagle_triton.sglang_plugin.patch_sglang."""
    version = importlib.import_module("sglang").__version__.partition("+")[0]
    if version not in _PATCH_POINTS:
        raise PatchError(
            f"sglang must be {' or '.join(_PATCH_POINTS)} to replace its tree kernels, got {version}; "
            "nothing was changed"
        )
    utils = importlib.import_module("sglang.srt.utils")
    for device in ("npu", "musa"):
        if _existing(utils, f"is_{device}")():
            raise PatchError(f"sglang {version} runs on {device.upper()}, for which there are no kernels here")
    skipped: dict[str, str] = {}
    patch_points = tuple(_PATCH_POINTS[version](utils, skipped))
    facts = patching.Facts("", skipped, {})
    return patching.apply(patch_points, _module("eagle_utils"), lambda: None, lambda: facts)


def _patch_points_0_5_13(utils: ModuleType, skipped: dict[str, str]) -> list[PatchPoint]:
    """Each module imported the names for itself, those that this device has; where it has no kernel for sampled trees,
    three constants send them to the argmax."""
    cuda = utils.is_cuda()
    gpu = cuda or utils.is_hip()
    eagle, info, info_v2 = _module("eagle_utils"), _module("eagle_info"), _module("eagle_info_v2")
    ngram, verify_greedy = _module("ngram_info"), replacements.verify_tree_greedy
    _existing(eagle, "build_tree_kernel_efficient")  # which calls the first of these
    patch_points = [
        _patch_point(eagle, "sgl_build_tree_kernel_efficient", replacements.build_tree, _BUILD, may_lack=not gpu),
        *(_patch_point(module, "verify_tree_greedy_func", verify_greedy, _GREEDY) for module in (eagle, info, info_v2)),
        _patch_point(ngram, "verify_tree_greedy", verify_greedy, _GREEDY, may_lack=not gpu),
    ]
    for module in (info, info_v2, ngram):
        kernel = replacements.tree_speculative_sampling_target_only
        patch_points.append(_patch_point(module, SAMPLING_KERNEL, kernel, _SAMPLED, may_lack=not cuda))
        for name, function in _RENORM.items():
            if cuda:
                _existing(module, name)
            else:
                patch_points.append(_patch_point(module, name, function, _SAMPLED, may_lack=True))
    for module, name, value in (
        (info, "TREE_SPEC_KERNEL_AVAILABLE", True),
        (ngram, "TREE_SPEC_KERNEL_AVAILABLE", True),
        (info_v2, "_is_hip", False),
    ):
        if _existing(module, name) is not value:
            patch_points.append(_patch_point(module, name, value, _SAMPLED))
    return patch_points + _dflash(skipped)


def _patch_points_0_5_23(utils: ModuleType, skipped: dict[str, str]) -> list[PatchPoint]:
    """All goes through one module; a name is None where the device has no kernel."""
    eagle = _module("eagle_utils")
    patch_points = [
        _patch_point(eagle, "build_tree_kernel_efficient_func", replacements.build_tree, _BUILD),
        _patch_point(eagle, "verify_tree_greedy_func", replacements.verify_tree_greedy, _GREEDY),
        _patch_point(eagle, SAMPLING_KERNEL, replacements.tree_speculative_sampling_target_only, _SAMPLED),
    ]
    uses_greedy = replacements.uses_greedy(_existing(eagle, "_verify_uses_greedy"))
    patch_points.append(_patch_point(eagle, "_verify_uses_greedy", uses_greedy, _SAMPLED))
    for name, function in _RENORM.items():
        if _existing(eagle, name) is None:
            patch_points.append(_patch_point(eagle, name, function, _SAMPLED))
    return patch_points + _dflash(skipped)


def _dflash(skipped: dict[str, str]) -> list[PatchPoint]:
    module = _module("dflash_utils")
    if _existing(module, SAMPLING_KERNEL) is None:
        skipped[f"{module.__name__}.{SAMPLING_KERNEL}"] = _DFLASH
        return []
    return [_patch_point(module, SAMPLING_KERNEL, replacements.tree_speculative_sampling_target_only, _SAMPLED)]


_PATCH_POINTS: dict[str, Callable[[ModuleType, dict[str, str]], list[PatchPoint]]] = {
    "0.5.13": _patch_points_0_5_13,
    "0.5.23": _patch_points_0_5_23,
}


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{_SPECULATIVE}.{name}")


def _existing(module: ModuleType, name: str) -> Any:
    if not hasattr(module, name):
        raise PatchError(f"{module.__name__}.{name} does not exist in this build of SGLang; nothing was changed")
    return getattr(module, name)


def _patch_point(module: ModuleType, name: str, replacement: Any, feature: str, may_lack: bool = False) -> PatchPoint:
    """may_lack: on this device SGLang does not import the name that it calls."""
    adds = may_lack and not hasattr(module, name)
    if not adds:
        _existing(module, name)
    return PatchPoint(module, name, replacement, f"{module.__name__}.{name}", feature, adds=adds)
