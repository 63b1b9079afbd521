"""`generate` of a plain Hugging Face model on the engine: preparation, supported options, plan, and decoding loop."""
