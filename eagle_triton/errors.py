"""The error for a model that cannot be read."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """eagle_triton cannot decode the model or a part of it. Nothing was changed.

    section: the section of docs/limits.md that says what is supported instead.
    """

    def __init__(self, message: str, section: str = "families"):
        super().__init__(f"{message} (docs/limits.md#{section})")


class UnknownLayerError(UnsupportedModelError):
    """A layer, or what the configuration says of layers, is none that the engine knows: docs/limits.md#layer-types."""

    def __init__(self, message: str):
        super().__init__(message, "layer-types")
