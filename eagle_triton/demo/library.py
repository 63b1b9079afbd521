"""Which files of the standard library the embedded checkpoints were trained on."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

# The last three are tables or other people's packages.
EXCLUDED_DIRECTORIES = frozenset(
    ["site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "_bundled"]
)
TEST_DIRECTORIES = frozenset(["test", "tests", "idle_test"])
EXCLUDED_PREFIXES = ("_sysconfigdata", "sitecustomize")
HELD_OUT_ONE_IN = 20


def library_paths(library: Path, with_tests: bool) -> list[Path]:
    """Every library file, relative to the library, sorted."""
    excluded = EXCLUDED_DIRECTORIES if with_tests else EXCLUDED_DIRECTORIES | TEST_DIRECTORIES
    found = []
    for directory, below, files in os.walk(library):
        below[:] = [name for name in below if name not in excluded]
        wanted = [name for name in files if name.endswith(".py") and not name.startswith(EXCLUDED_PREFIXES)]
        found += [Path(directory, name).relative_to(library) for name in wanted]
    return sorted(found)


def is_held_out(relative_path: str) -> bool:
    """The fixed rule that splits the library: by a hash of the path, one file in HELD_OUT_ONE_IN, none of the tests."""
    if TEST_DIRECTORIES.intersection(relative_path.split("/")):
        return False
    return int.from_bytes(hashlib.sha256(relative_path.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0
