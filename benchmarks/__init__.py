"""What benchmark.py runs: `generate`, `step`, `batches`, `megakernel` and `operations` measure, the rest builds
models, times and records. `arguments` reads the command lines of all scripts."""
