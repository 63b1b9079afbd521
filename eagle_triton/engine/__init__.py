"""The decode engine: models, layers and drafts in the form that it reads, its tensors, the step, the running batch."""
