"""What is raised for a model that cannot be read."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """The model, or a part of it, is not one that eagle_triton knows how to decode. Nothing was changed.

    section: that of docs/limits.md which says what is supported instead.
    """

    def __init__(self, message: str, section: str = "families"):
        super().__init__(f"{message} (docs/limits.md#{section})")
