"""Reads loaded models into a ModelView and a Draft, with which the engine decodes."""
