"""What benchmark.py runs: `generate`, `step` and `operations` measure, the rest builds models, times and records."""
