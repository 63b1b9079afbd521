"""Handing a draft head over to the engines that serve fleets: vLLM, SGLang, speculators, and SafeAILab's EaModel.

`export_head.py` is the door. `source.py` finds a head and its target, `contents.py` is what no layout changes of it.
`vllm.py`, `sglang.py`, `speculators.py` and `safeailab.py` write it, each in its layout, and refuse what it cannot do;
`flat_config.py` is what the first two have in common, `engines.py` which options each reads. `launch_plan.py` says how
it is served, `comparison.py` reads it back. `quantize.py` writes a target in eight or four bits, and `text_loss.py`
measures what that costs. `folder.py` sees to it that what is written is whole.
"""
