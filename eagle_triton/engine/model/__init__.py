"""A model as the engine reads it, and its forward."""
