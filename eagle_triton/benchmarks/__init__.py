"""What `eagle-triton bench` and benchmark.py run: `main` reads their command line, `generate`, `step`, `batches`,
`megakernel`, `drafters`, `questions`, `egag`, `prefill`, `plain`, `mtp` and `operations` measure, the rest builds
models, times and records."""
