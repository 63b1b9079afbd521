"""Puts our tree kernels where SGLang's workers call SGLang's, for SGLang 0.5.13 and 0.5.23.

`register` is the entry point `eagle_triton` of the group `sglang.srt.plugins`, which SGLang calls in its processes.
`patch_sglang` does the same in one process, and returns what undoes it. This file imports neither torch nor Triton, so
that an unused entry point costs nothing.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle_triton.patching import Originals

NAME = "eagle_triton"
VARIABLE = "SGLANG_PLUGINS"

logger = logging.getLogger(__name__)


def patch_sglang() -> Originals:
    """Put our tree building and verification into SGLang's modules, in this process.

    Imports modules of SGLang. `restore()` of the returned object, or the end of a `with` block, puts SGLang's own
    objects back; `report()` counts the calls of each replacement and says what was left to SGLang and why. Raises
    ImportError if SGLang or one of these modules cannot be imported, and PatchError, before anything is changed, if its
    version is unknown, if a module lacks a name that this version should have, if the device has no Triton kernels here
    (NPU, MUSA), or if SGLang is patched already.
    """
    from eagle_triton.sglang_plugin.patch import patch

    return patch()


def register() -> None:
    """SGLang's entry point: `patch_sglang()` if the variable SGLANG_PLUGINS names `eagle_triton`, else nothing.

    SGLang calls every installed plug-in where the variable is not set; this one has to be asked for. Raises what
    `patch_sglang` raises; SGLang then logs the error and goes on with its own kernels.
    """
    asked = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    if NAME not in asked:
        logger.info("%s does not name %s: SGLang keeps its own tree kernels", VARIABLE, NAME)
        return
    originals = patch_sglang()
    for patch_point in originals.report():
        logger.info("%s: %s %s", patch_point.path, patch_point.status, patch_point.reason or patch_point.feature)
