"""What tools/tune_linear.py runs."""
