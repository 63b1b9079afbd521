"""`generate` of a plain Hugging Face model on the engine: preparation, what of a call is honoured, plan, loop."""
