"""The sweeps of tools/tune_linear.py and tools/tune_attention.py."""
