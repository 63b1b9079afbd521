"""The modes of `eagle-triton bench` and benchmark.py. `main` reads the command line; `generate`, `step`, `batches`,
`megakernel`, `drafters`, `questions`, `egag`, `prefill`, `plain`, `mtp` and `operations` measure; other files build
models, time and record."""
