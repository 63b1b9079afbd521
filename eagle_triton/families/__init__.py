"""Families of models: reads a loaded model for the engine, and replaces its methods."""
