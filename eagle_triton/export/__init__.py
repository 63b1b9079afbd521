"""Exports a draft head to vLLM, SGLang, speculators, or SafeAILab's EaModel.

`export_head.py` is the entry point. `source.py` finds a head and its target, `contents.py` has the parts that no layout
changes. `vllm.py`, `sglang.py`, `speculators.py` and `safeailab.py` each write their layout, and refuse heads that
their engine cannot run. `flat_config.py` is common to the first two, `engines.py` has the options that each reads.
`launch_plan.py` says how to serve the head, `comparison.py` reads it back. `quantize.py` writes a target in eight or
four bits, and `text_loss.py` measures the cost of that. `folder.py` writes a folder whole or not at all.
"""
