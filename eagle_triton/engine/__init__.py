"""The decode engine, written once: models, layers and drafts as it reads them, tensors, the step, the running batch."""
