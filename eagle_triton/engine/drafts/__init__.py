"""Drafts: one class for each kind. `Draft` is their interface to the engine."""
