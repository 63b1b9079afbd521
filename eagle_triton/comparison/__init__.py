"""Drafting methods beside each other: an answer with its steps, figures of answers, and a file that a run goes on from.

`benchmark.py drafters|egag|questions`, `eagle-triton ablation` and `eagle-triton chat` are front ends of this.
"""
