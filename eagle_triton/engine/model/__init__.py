"""A model in the form that the engine reads, and its forward."""
