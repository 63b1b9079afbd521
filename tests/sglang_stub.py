"""Modules with the names and call shapes of SGLang 0.5.13's and 0.5.23's tree code, for tests without SGLang.

Only what a patch sees is here: which module holds which name on which device, who calls it by that name, and with which
arguments. Kernels of SGLang's own are stand-ins that say that they were called.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

SPECULATIVE = "sglang.srt.speculative"
KERNELS = ("cuda", "hip")  # devices on which there are kernels at all


class Theirs(Exception):
    """A kernel of SGLang's own was called."""


_COMMON = """
import torch


def _mask_of(mode, nodes, batch, lengths, buffer, fill):
    if buffer is not None:
        if mode == 2:
            buffer.fill_(0)
        elif mode == 1 or fill:
            buffer.fill_(True)
        return buffer
    if mode == 2:
        dtype = torch.uint8 if nodes <= 8 else torch.uint16 if nodes <= 16 else torch.uint32
        return torch.zeros(batch * nodes, dtype=dtype)
    return torch.ones(batch * nodes * nodes + (nodes * lengths if mode == 0 else 0), dtype=torch.bool)


def _outputs(rows, batch, width):
    predicts = torch.full((rows,), -7, dtype=torch.int32)
    accepted = torch.full((batch, width), -1, dtype=torch.int32)
    return predicts, accepted, torch.zeros(batch, dtype=torch.int32)


def _softmax(job):
    probs = torch.softmax(job.logits / job.temperatures.repeat_interleave(job.nodes)[:, None], dim=-1)
    probs = top_k_renorm_prob(probs, job.top_ks.repeat_interleave(job.nodes))
    return top_p_renorm_prob(probs, job.top_ps.repeat_interleave(job.nodes)).view(job.batch, job.nodes, -1)


def _sampled(job, outputs):
    probs = _softmax(job)
    return dict(
        zip(("predicts", "accept_index", "accept_token_num"), outputs),
        candidates=job.candidates, retrive_index=job.links[0], retrive_next_token=job.links[1],
        retrive_next_sibling=job.links[2], uniform_samples=job.coins, uniform_samples_for_final_sampling=job.final,
        target_probs=probs, draft_probs=torch.zeros_like(probs), threshold_single=1.0, threshold_acc=1.0,
        deterministic=True,
    )


def _greedy(job, outputs, spelling):
    names = [f"{spelling}_{part}" for part in ("index", "next_token", "next_sibling")]
    return dict(
        zip(("predicts", "accept_index", "accept_token_num"), outputs), **dict(zip(names, job.links)),
        candidates=job.candidates, target_predict=job.logits.argmax(-1).view(job.batch, job.nodes),
    )
"""

_BUILD = """
def build_tree_kernel_efficient(
    bonus_tokens, parent_list, top_scores_index, draft_tokens, seq_lens, seq_lens_sum, topk, spec_steps,
    num_verify_tokens, tree_mask_mode=0, tree_mask_buf=None, {last}
):
    tokens = torch.cat((bonus_tokens[:, None], draft_tokens), dim=1).flatten()
    batch = len(seq_lens)
    mask = _mask_of(tree_mask_mode, num_verify_tokens, batch, seq_lens_sum, tree_mask_buf, {fill})
    links = torch.full((3, batch, num_verify_tokens), -1, dtype=torch.long)
    positions = {positions}
    {kernel}(
        parent_list, top_scores_index, seq_lens, mask, positions, *links, topk, spec_steps, num_verify_tokens,
        tree_mask_mode,
    )
    return (mask, positions, *links, tokens)
"""

_0_5_13 = {
    "eagle_utils": _COMMON
    + _BUILD.format(
        last="position_buf=None",
        fill="True",
        positions="torch.empty(batch * num_verify_tokens, dtype=torch.long) if position_buf is None else position_buf",
        kernel="sgl_build_tree_kernel_efficient",
    )
    + """
def verify_tree_greedy_func(predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token,
                            retrieve_next_sibling, target_predict, topk=-1):
    theirs()
""",
    "eagle_info": _COMMON
    + """
def verify(job):
    outputs = _outputs(job.batch * job.nodes + 1, job.batch, job.width)
    if job.greedy or not TREE_SPEC_KERNEL_AVAILABLE:
        return verify_tree_greedy_func(**_greedy(job, outputs, "retrieve"), topk=job.topk)
    tree_speculative_sampling_target_only(**_sampled(job, outputs))
    return outputs
""",
    "eagle_info_v2": _COMMON
    + """
def verify(job):
    outputs = _outputs(job.batch * job.nodes, job.batch, job.width)
    if job.greedy or _is_npu or _is_hip:
        return verify_tree_greedy_func(**_greedy(job, outputs, "retrieve"), topk=job.topk)
    tree_speculative_sampling_target_only(**_sampled(job, outputs))
    return outputs
""",
    "ngram_info": _COMMON
    + """
def verify(job):
    outputs = _outputs(job.batch * job.nodes + 1, job.batch, job.nodes)
    if job.greedy or not TREE_SPEC_KERNEL_AVAILABLE:
        verify_tree_greedy(**_greedy(job, outputs, "retrive"))
    else:
        tree_speculative_sampling_target_only(**_sampled(job, outputs))
    return outputs
""",
}

_0_5_23 = {
    "eagle_utils": _COMMON
    + _BUILD.format(
        last="fill_prefix_mask=True",
        fill="fill_prefix_mask",
        positions="torch.empty(batch * num_verify_tokens, dtype=torch.long)",
        kernel="build_tree_kernel_efficient_func",
    )
    + """
def _verify_uses_greedy(*, is_all_greedy, is_cpu, is_hip, is_xpu, use_rejection_sampling):
    return is_all_greedy or is_cpu or is_xpu or (is_hip and not use_rejection_sampling)


def verify(job):
    outputs = _outputs(job.batch * job.nodes, job.batch, job.width)
    if _verify_uses_greedy(is_all_greedy=job.greedy, is_cpu=_is_cpu, is_hip=_is_hip, is_xpu=_is_xpu,
                           use_rejection_sampling=job.rejection):
        return verify_tree_greedy_func(**_greedy(job, outputs, "retrieve"), topk=job.topk)
    sampling = chain_speculative_sampling_triton if job.rejection else tree_speculative_sampling_target_only
    sampling(**_sampled(job, outputs))
    return outputs
""",
}


def kernel(*_, **__):
    raise Theirs


def renorm(probs, _):
    """SGLang's own, where the device has it: told from ours by its result."""
    return probs


def install(monkeypatch, version: str, device: str) -> SimpleNamespace:
    """Put the modules of that version into sys.modules, as they are on that device; returns the leaf modules."""
    for name in ("sglang", "sglang.srt", "sglang.srt.utils", SPECULATIVE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["sglang"].__version__ = version
    for kind in ("cuda", "hip", "xpu", "npu", "musa", "cpu"):
        setattr(sys.modules["sglang.srt.utils"], f"is_{kind}", lambda kind=kind: kind == device)
    sources = _0_5_13 if version.startswith("0.5.13") else _0_5_23
    modules = {}
    for leaf in (*sources, "dflash_utils"):
        module = modules[leaf] = ModuleType(f"{SPECULATIVE}.{leaf}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(sources.get(leaf, ""), f"<{leaf} of {version}>", "exec"), vars(module))
        vars(module).update(theirs=kernel)
    sampling = kernel if device == "cuda" else None
    modules["dflash_utils"].tree_speculative_sampling_target_only = sampling
    eagle = modules["eagle_utils"]
    if sources is _0_5_13:
        if device in KERNELS:
            eagle.sgl_build_tree_kernel_efficient = modules["ngram_info"].verify_tree_greedy = kernel
        for leaf in ("eagle_info", "eagle_info_v2", "ngram_info"):
            if device == "cuda":
                vars(modules[leaf]).update(top_k_renorm_prob=renorm, top_p_renorm_prob=renorm)
                modules[leaf].tree_speculative_sampling_target_only = kernel
            if leaf != "ngram_info":
                modules[leaf].verify_tree_greedy_func = eagle.verify_tree_greedy_func
            if leaf != "eagle_info_v2":
                modules[leaf].TREE_SPEC_KERNEL_AVAILABLE = device == "cuda"
        vars(modules["eagle_info_v2"]).update(_is_hip=device == "hip", _is_npu=device == "npu")
    else:
        for kind in ("cpu", "hip", "xpu"):
            setattr(eagle, f"_is_{kind}", kind == device)
        eagle.build_tree_kernel_efficient_func = eagle.verify_tree_greedy_func = kernel
        eagle.tree_speculative_sampling_target_only = sampling
        eagle.chain_speculative_sampling_triton = kernel
        eagle.top_k_renorm_prob = eagle.top_p_renorm_prob = renorm if device in KERNELS else None
    return SimpleNamespace(**modules)
