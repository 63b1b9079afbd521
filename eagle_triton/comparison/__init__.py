"""Compares drafting methods: an answer with its steps, figures over answers, and a file of results to resume from.

`benchmark.py drafters|egag|questions`, `eagle-triton ablation` and `eagle-triton chat` are front ends of this.
"""
