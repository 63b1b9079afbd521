"""Which requests run, and what each step does."""
