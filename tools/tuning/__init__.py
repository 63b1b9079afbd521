"""What tools/tune_linear.py and tools/tune_attention.py run."""
