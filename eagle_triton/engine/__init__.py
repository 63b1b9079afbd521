"""The decode engine, written once: state (tensors), step (one decode step), generate (loop and stop rules)."""
