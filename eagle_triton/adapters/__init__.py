"""Reads a loaded EaModel into a ModelView and a DraftView: one module per family of models."""
