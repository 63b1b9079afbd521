"""Reads loaded models into what the engine decodes with, a ModelView and a Draft: one module per family of models."""
