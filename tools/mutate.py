"""Break the code in known ways, one at a time, and see that a test notices each.

    python tools/mutate.py                  all mutations, some ten minutes on two cores
    python tools/mutate.py catch-up copies  those whose names contain one of these

Each mutation replaces one piece of text in a copy of the tree and runs the tests that must then fail. The exit status
is 1 if a mutation survives, or if its text is no longer there: bring it up to date then. Drafts never show in the
output, which is why some of these tests look at accepted lengths.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_triton.command_line import Parser, run_program, whole

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 300  # seconds for the tests of one mutation
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "results", "node_modules")


class Mutation(NamedTuple):
    """`text` of a file of the package becomes `broken`; `tests` are pytest's arguments."""

    name: str
    file: str
    text: str
    broken: str
    tests: str


MUTATIONS = [
    Mutation(
        "commit keeps one row too few",
        "reference/kv_cache.py",
        "moved = (step >= 0) & (step <= accepted[:, None])",
        "moved = (step >= 0) & (step < accepted[:, None])",
        "tests/test_kv_cache.py -k keeps_the_accepted",
    ),
    Mutation(
        "latents of a tree stay where they were",
        "engine/model/latent_attention.py",
        "if not accepted.of_chain:",
        "if accepted.of_chain:",
        "tests/test_families.py -k youtu",
    ),
    Mutation(
        "how a layer's latent attention rotates is the body's",
        "families/causal_lm.py",
        'own = attention.value("config")',
        "own = config",
        "tests/test_families.py -k each_layer_says",
    ),
    Mutation(
        "the next root is not written",
        "reference/verification.py",
        "token = torch.where(index <= accepted, given[:, index], next_token)[:, None]",
        "token = torch.where(index <= accepted, given[:, index], given[:, index])[:, None]",
        "tests/test_verification.py -k update_sequence_commits",
    ),
    Mutation(
        "a head's sliding window is dropped",
        "families/own_ea_model.py",
        "sliding_window=sizes.sliding_window,",
        "sliding_window=None,",
        "tests/test_eagle31.py::test_drafts_are_those_of_a_plain_forward[window-chain]",
    ),
    Mutation(
        "a plain head's sliding window is one token wider",
        "models/heads.py",
        "cumsum(-1).flip(-1) <= window)",
        "cumsum(-1).flip(-1) <= window + 1)",
        "tests/test_eagle31.py -k window_sees",
    ),
    Mutation(
        "an EaModel's logits are not divided",
        "models/target.py",
        "logits = self.lm_head(hidden) * self.factor / self.divisor",
        "logits = self.lm_head(hidden)",
        "tests/test_families.py -k scaled_and_capped",
    ),
    Mutation(
        "ties go to the higher index",
        "reference/tree_decoding.py",
        "torch.arange(count - 1, -1, -1, device=scores.device)",
        "torch.arange(count, device=scores.device)",
        "tests/test_tree_decoding.py -k ties",
    ),
    Mutation(
        "a norm overwrites the part that another rank may still read",
        "ops/layers/norms.py",
        "place = ((use & 1) * peers.place_rows + row) * peers.place_width",
        "place = (0 * peers.place_rows + row) * peers.place_width",
        "tests/test_peer_memory.py -k may_still_read",
    ),
    Mutation(
        "a norm does not wait for another rank's part",
        "runtime/peer_exchange.py",
        "while (seen - use < 0) & (polled < polls):",
        "while (seen - use < 0) & (polled < 0):",
        "tests/test_peer_memory.py -k two_processes",
    ),
    Mutation(
        "columns are joined before another rank's are there",
        "ops/exchange.py",
        "        signal_and_wait(signal_addresses_ptr, failed_ptr, failed_on_host_ptr, here, use, rank, polls, RANKS)",
        "        pass",
        "tests/test_exchange.py -k waits_for_others",
    ),
    Mutation(
        "what is sent is read before it is there",
        "runtime/peer_exchange.py",
        "while (missing > 0) & (polled < polls):",
        "while (missing > 0) & (polled < 0):",
        "tests/test_peer_memory.py -k two_processes",
    ),
    Mutation(
        "the scales in the state of a bitsandbytes parameter are not watched",
        "engine/model/module_kinds.py",
        "yield from _state_of(tensor)",
        "pass",
        "tests/test_four_bits.py -k replaced",
    ),
    Mutation(
        "the rows of a draft in four bits have the scales of others",
        "engine/drafts/quantised.py",
        "scale=torch.cat([part.scale for part in parts])",
        "scale=torch.cat([part.scale for part in parts]).flip(0)",
        "tests/test_drafts_in_four_bits.py -k rounded_in_parts",
    ),
    Mutation(
        "every rank adds the bias of an FP8 projection that they share",
        "families/reading/quantised.py",
        "bias = found.bias if ranks is None or ranks.rank == 0 else None",
        "bias = found.bias",
        "tests/test_tensor_parallel.py -k fp8_weights",
    ),
    Mutation(
        "a forward over recurrent layers that was interrupted is read on",
        "engine/scheduler/batch_slots.py",
        "self._prompts.restart(forward)",
        "pass",
        "tests/test_hybrid_targets.py -k interrupted",
    ),
    Mutation(
        "a piece of a prompt finds the state of its slot's former request",
        "ops/gated_delta/pieces.py",
        "known = (tl.load(starts_ptr + piece) > 0) & (follows == 0)",
        "known = follows == 0",
        "tests/test_gated_delta.py -k pieces_of_prompts_give",
    ),
    Mutation(
        "top-p is ignored",
        "reference/sampling.py",
        "cumsum(-1) <= (1 - top_p).float()[:, None, None]",
        "cumsum(-1) <= 0 * (1 - top_p).float()[:, None, None]",
        "tests/test_sampling.py -k probabilities",
    ),
    Mutation(
        "top_p_first is ignored by the batch",
        "engine/scheduler/step_planner.py",
        "top_p_first=True in orders",
        "top_p_first=False",
        "tests/test_batch.py -k order_of_the_filters",
    ),
    Mutation(
        "the original's arguments filter top-k first",
        "engine/sampling_params.py",
        "            top_p_first=True,\n",
        "",
        "tests/test_batch.py -k originals_arguments",
    ),
    Mutation(
        "generate ignores its seed",
        "families/generate.py",
        "make_generator(seed, generator",
        "make_generator(None, generator",
        "tests/test_integration.py -k padded_batch",
    ),
    Mutation(
        "every depth has the same noise",
        "reference/verification.py",
        "lengths[:, None] + below, vocabulary)",
        "lengths[:, None] + below * 0 + 1, vocabulary)",
        "tests/test_verification.py -k does_not_see_the_tree",
    ),
    Mutation(
        "the first token has the second one's noise",
        "engine/prefill.py",
        "tree, 0, before, state.sampling",
        "tree, 0, before + 1, state.sampling",
        "tests/test_batch.py -k every_tree_batch",
    ),
    Mutation(
        "reject_all accepts",
        "engine/step.py",
        'if policy == "reject_all":',
        'if policy == "never":',
        "tests/test_batch.py -k reject_all",
    ),
    Mutation(
        "every step has the same coins",
        "reference/verification.py",
        "    counter += 1\n",
        "",
        "tests/test_batch.py -k coins_of_its_own",
    ),
    Mutation(
        "NaN logits are not reported",
        "reference/verification.py",
        "reason = torch.where(nan, ERROR, reason) * active",
        "reason = reason * active",
        "tests/test_batch.py -k nan_logits",
    ),
    Mutation(
        "stop tokens of a slot's last request stay",
        "engine/scheduler/slot_options.py",
        "tensor[slots] = upload(values, tensor.dtype, tensor.device)",
        "old = tensor[slots] if tensor is stops.ids else -(2**31)\n"
        "        tensor[slots] = upload(values, tensor.dtype, tensor.device).maximum(torch.as_tensor(old))",
        "tests/test_batch.py -k staggered",
    ),
    Mutation(
        "copies of a prompt: the draft's cache is not copied",
        "engine/state.py",
        "        by_slot.copy(self.draft_tensors, source, target, length)\n",
        "",
        "tests/test_batch.py -k equal_prompts",
    ),
    Mutation(
        "copies of a prompt: the target's caches are not copied",
        "engine/state.py",
        "        self.caches.copy(source, target, length)\n",
        "",
        "tests/test_batch.py -k equal_prompts",
    ),
    Mutation(
        "catch-up begins one token early",
        "engine/drafts/beams.py",
        "ops.sequence_rows(sequences.tokens, known + 1, features.shape[1])",
        "ops.sequence_rows(sequences.tokens, known, features.shape[1])",
        "tests/test_batch.py -k drafting_resumes",
    ),
    Mutation(
        "plain steps keep no features",
        "engine/step.py",
        "if mode.keep_features and sequences.skipped is not None:",
        "if False:",
        "tests/test_batch.py -k drafting_resumes",
    ),
    Mutation(
        "the draft extends by the first nodes, not by the accepted ones",
        "engine/drafts/beams.py",
        "ops.gather_rows(features, accepted.path)",
        "features[:, : accepted.path.shape[1]].contiguous()",
        "tests/test_integration.py -k every_method",
    ),
    Mutation(
        "the tree grows from the first emitted token",
        "engine/drafts/beams.py",
        "ops.gather_rows(output, accepted.accepted[:, None], out=kept)",
        "ops.gather_rows(output, accepted.accepted[:, None] * 0, out=kept)",
        "tests/test_integration.py -k every_method",
    ),
    Mutation(
        "d2t is ignored while drafting",
        "engine/drafts/beams.py",
        "offsets=self.d2t",
        "offsets=None",
        "tests/test_integration.py -k every_method",
    ),
    Mutation(
        "a model drafts with a head's rows",
        "engine/drafts/causal_lm.py",
        "first_token: ClassVar[int] = 0",
        "first_token: ClassVar[int] = 1",
        "tests/test_causal_lm.py -k equal_to_the_target",
    ),
    Mutation(
        "a pass in one launch forgets those before it",
        "engine/drafts/causal_lm.py",
        "launched(ops, tokens, caches, rows.lengths, rows.skip)",
        "launched(ops, tokens, caches, rows.lengths)",
        "tests/test_one_launch.py -k chain",
    ),
    Mutation(
        "one sequence never decodes in one launch",
        "engine/scheduler/step_planner.py",
        "one_launch=self._engine.ops.one_launch and self.only_plain_steps",
        "one_launch=False",
        "tests/test_one_launch.py -k plain_steps",
    ),
    Mutation(
        "a cleared slot keeps its layers' memory",
        "engine/prefill.py",
        "        part.caches.clear()\n",
        "",
        "tests/test_hybrid_targets.py -k entered_again",
    ),
    Mutation(
        "layers share the cache of layer 0",
        "engine/model/layer_caches.py",
        "return self.caches[kind].layer(place, ",
        "return self.caches[0].layer(0, ",
        "tests/test_mixers.py -k other_shapes",
    ),
    Mutation(
        "log-probabilities are not cut at a stop string",
        "inference/session.py",
        "                del scores[kept:]\n",
        "                pass\n",
        "tests/test_speculative_inference.py -k stop_strings",
    ),
    Mutation(
        "a failed batch goes on",
        "engine/scheduler/batch_slots.py",
        "            self._failure = error\n            raise\n",
        "            raise\n",
        "tests/test_batch.py -k goes_no_further",
    ),
    Mutation(
        "a closed batch goes on",
        "engine/scheduler/batch_slots.py",
        "        if self.closed:\n",
        "        if False:\n",
        "tests/test_batch.py -k a_closed_batch",
    ),
    Mutation(
        "slots keep the length of a prompt that failed",
        "engine/scheduler/batch_slots.py",
        "self.sequences.lengths[run].zero_()  # they cost no attention",
        "pass",
        "tests/test_batch.py -k interrupted_prefill",
    ),
    Mutation(
        "roots of those who enter are written for all",
        "engine/drafts/beams.py",
        "torch.where(entering, before, sequences.capacity)",
        "torch.where(entering, before, before)",
        "tests/test_prefill.py -k leaves_the_others_trees",
    ),
    Mutation(
        "what the draft keeps of the root is overwritten for all",
        "engine/drafts/beams.py",
        "kept.copy_(torch.where(where[:, None, None], output, kept))",
        "kept.copy_(output)",
        "tests/test_prefill.py -k leaves_the_others_trees",
    ),
    Mutation(
        "a NaN after a prompt that is read between steps is not told",
        "engine/scheduler/steps_in_flight.py",
        "request, (root, nan, _) = entry.request, report.tolist()",
        "request, (root, _, _), nan = entry.request, report.tolist(), 0",
        "tests/test_prefill.py -k nan_logits_of_a_prompt_alone",
    ),
    Mutation(
        "the last row of a prompt is a row too early",
        "engine/prefill.py",
        "piece.end - piece.start - 1",
        "max(piece.end - piece.start - 2, 0)",
        "tests/test_prefill.py -k come_and_go",
    ),
    Mutation(
        "a rehearsal begins those who have begun before",
        "engine/prefill.py",
        "        self._entering.zero_()\n",
        "",
        "tests/test_prefill.py -k rehearsal",
    ),
    Mutation(
        "a failed forward is not read again",
        "engine/scheduler/batch_slots.py",
        "        if self._prefill.read(forward, self.planner.draft, ",
        "        self._prompts.take(forward)\n        if self._prefill.read(forward, self.planner.draft, ",
        "tests/test_prefill.py -k interrupt_while",
    ),
    Mutation(
        "a forward for which there was no memory is not read again",
        "engine/scheduler/batch_slots.py",
        "self._extras_of(forward.pieces[0].slot)):\n            return 0\n",
        "self._extras_of(forward.pieces[0].slot)):\n            pass\n",
        "tests/test_prefill.py -k no_memory_for_a_long",
    ),
    Mutation(
        "a forward with a gap is read as one long prompt's",
        "engine/long_prompts.py",
        "if starts != [(piece.slot, piece.start) for piece in forward.pieces]:",
        "if False:",
        "tests/test_prefill.py -k which_forwards",
    ),
    Mutation(
        "stretches of a long prompt weigh alike",
        "ops/prompt_attention.py",
        "weight = tl.exp(lse - top)",
        "weight = tl.exp(tl.maximum(lse - top, 0.0))",
        "tests/test_prompt_attention.py -k parts_are_added",
    ),
    Mutation(
        "rows after a long prompt are copied too",
        "ops/prompt_attention.py",
        "mask=(index < count)[:, None] & inside, other=0.0)",
        "mask=(index < rows)[:, None] & inside, other=0.0)",
        "tests/test_prompt_attention.py -k rows_behind",
    ),
    Mutation(
        "random numbers come again after a pause",
        "engine/scheduler/requests.py",
        "self.gamma, self.page_rows = math.inf, 0",
        "self.gamma, self.page_rows, self.steps = math.inf, 0, 0",
        "tests/test_pauses.py -k random_numbers",
    ),
    Mutation(
        "who came first pauses",
        "engine/scheduler/batch_slots.py",
        "return max(may, key=lambda entry: entry.index).slot",
        "return min(may, key=lambda entry: entry.index).slot",
        "tests/test_pauses.py -k who_came_first",
    ),
    Mutation(
        "a request that comes overtakes those that wait for room",
        "engine/scheduler/batch.py",
        "        if entries and self._present(paused=True):\n",
        "        if False:\n",
        "tests/test_pauses.py -k overtakes",
    ),
    Mutation(
        "a page that is shared goes with the first who leaves",
        "engine/memory/pages.py",
        "self._holders[page] = self._holders.get(page, 0) + 1",
        "self._holders[page] = 1",
        "tests/test_pages.py -k lost_or_shared",
    ),
    Mutation(
        "a page that was not read is kept",
        "engine/memory/pages.py",
        "                self.unread.remove(page)\n                self._forget_key(page)\n",
        "                self.unread.remove(page)\n",
        "tests/test_pages.py -k not_read_to_the_end",
    ),
    Mutation(
        "a page is found whatever token follows it",
        "engine/memory/pages.py",
        "values[first : first + PAGE_ROWS + 1]",
        "values[first : first + PAGE_ROWS]",
        "tests/test_pages.py -k up_to_the_one_behind",
    ),
    Mutation(
        "a free slot writes where it did",
        "engine/memory/pages.py",
        "            self.table[run].zero_()\n",
        "            pass\n",
        "tests/test_pages.py -k lost_or_shared",
    ),
    Mutation(
        "a page that one request reads is not read by the next",
        "engine/prompt_queue.py",
        "reading.pages[page] in taken or reading.pages[page] not in self._unread",
        "page < reading.start // PIECE_ROWS + 1",
        "tests/test_pages.py -k lost_or_shared",
    ),
    Mutation(
        "drafted requests find what was decoded plainly",
        "engine/scheduler/batch_slots.py",
        'b"plain" if self.planner.draft is None else b"drafts"',
        'b"plain"',
        "tests/test_pages.py -k share_nothing",
    ),
    Mutation(
        "kept pages outlive the weights they come from",
        "engine/engine.py",
        "            self._weights = weights\n            self.pool.forget()\n",
        "            self._weights = weights\n",
        "tests/test_pages.py -k change_in_place",
    ),
    Mutation(
        "what was read is kept although its pages are of other weights",
        "engine/scheduler/batch.py",
        "        if outdated:\n",
        "        if outdated and False:\n",
        "tests/test_pages.py -k change_in_place",
    ),
    Mutation(
        "no prompt is read ahead",
        "families/hf_generate/read_ahead.py",
        "self._repeated, self._last = asked is not None and asked == self._last, asked",
        "self._repeated, self._last = False, asked",
        "tests/test_read_ahead.py -k third",
    ),
    Mutation(
        "prompts are read ahead for calls that want others",
        "families/hf_generate/read_ahead.py",
        "not (asked == self._asked and _same(plan.prompts, self._prompts))",
        "not asked == self._asked",
        "tests/test_read_ahead.py -k turns_out",
    ),
    Mutation(
        "prompts are read although weights were moved",
        "engine/engine.py",
        "if self._called_state or self._weights is None or self.watch.moved():",
        "if self._called_state or self._weights is None:",
        "tests/test_read_ahead.py -k memory_that_is_gone",
    ),
    Mutation(
        "experts that are read are not watched",
        "engine/model/model_watch.py",
        "(is_mixture(child) and child not in also)",
        "is_mixture(child)",
        "tests/test_experts.py -k watched",
    ),
    Mutation(
        "a mixture gets no chain",
        "inference/eagle_inference.py",
        "if view.has_mixtures and",
        "if False and",
        "tests/test_families.py -k default_over_a_mixture",
    ),
    Mutation(
        "a draft model of a mixture grows a tree",
        "integration.py",
        "lambda: TreeSpec.chain(MIXTURE_DRAFTS) if chain else config.tree",
        "lambda: config.tree",
        "tests/test_families.py -k default_of_generate",
    ),
    Mutation(
        "replaced weights are not noticed",
        "engine/model/model_watch.py",
        "if (tensors := _addresses(module)) != self.tensors:",
        "if (tensors := _addresses(module)) != self.tensors and False:",
        "tests/test_model_watch.py -k replaced_later",
    ),
    Mutation(
        "hooks that came later are not noticed",
        "engine/model/model_watch.py",
        "if (module._forward_hooks or module._forward_pre_hooks) and (hook := _hook(module)):",
        "if (hook := _hook(module)) and False:",
        "tests/test_model_watch.py -k comes_later",
    ),
    Mutation(
        "kept rows are drafted over",
        "families/topk_generate.py",
        " and newest.get(state) == known",
        "",
        "tests/test_integration.py -k rows_that_were_kept",
    ),
    Mutation(
        "cancel does not free the slot",
        "inference/session.py",
        "            self._batch.release(running.slot)\n            del self._running[index]\n",
        "            del self._running[index]\n",
        "tests/test_speculative_inference.py -k cancelled",
    ),
    Mutation(
        "the policy forgets the target's own token",
        "inference/policy.py",
        "self.emitted += share * (length + 1)",
        "self.emitted += share * length",
        "tests/test_speculative_helpers.py -k policy_expects",
    ),
    Mutation(
        "restore leaves the bound original on the instance",
        "patching.py",
        "(attribute, entry.own))",
        "(attribute, entry.original))",
        "tests/test_patching.py",
    ),
    Mutation(
        "an occurrence that nothing follows lowers a suffix draft's probability",
        "reference/suffix_match.py",
        "len(positions) - (0 if rules.parity else len(ended))",
        "len(positions)",
        "tests/test_suffix_match.py -k unique_repeat",
    ),
    Mutation(
        "a suffix draft prefers the shorter of equal matches",
        "reference/suffix_match.py",
        "Fraction(0))) > score:",
        "Fraction(0))) >= score:",
        "tests/test_suffix_match.py -k parity_counts",
    ),
    Mutation(
        "an n-gram that reaches another's count takes its place",
        "reference/ngram_table.py",
        "if count > float(",
        "if count >= float(",
        "tests/test_ngram_table.py -k numbers_by_hand",
    ),
    Mutation(
        "a sequence that has ended teaches the token after it",
        "engine/drafts/counted.py",
        "state.lengths + state.active",
        "state.lengths + 1",
        "tests/test_counted_drafts.py -k has_ended",
    ),
    Mutation(
        "the suffix cache forgets its newest request",
        "inference/arctic_suffix_cache.py",
        "del self._outputs[next(iter(self._outputs))]",
        "del self._outputs[next(reversed(self._outputs))]",
        "tests/test_suffix_match.py -k oldest_request",
    ),
    Mutation(
        "clocks of the device before the replayed steps count",
        "benchmarks/gpu_clocks.py",
        "            if start.query():\n",
        "            if True:\n",
        "tests/test_gpu_clocks.py -k between_the_events",
    ),
    Mutation(
        "clocks of the device after the replayed steps count",
        "benchmarks/gpu_clocks.py",
        "if end.query():  # the device",
        "if False:  # the device",
        "tests/test_gpu_clocks.py -k device_ends",
    ),
    Mutation(
        "tokens that a grammar forces are not drafted",
        "engine/scheduler/grammar_masks.py",
        "        if any(tokens[0] >= 0 for tokens in forced):\n",
        "        if False:\n",
        "tests/test_grammars.py -k forced_tokens_are_drafted",
    ),
    Mutation(
        "all steps with a grammar wait for the next trees",
        "engine/scheduler/grammar_masks.py",
        "        if sent is None or sent.state is not state:\n",
        "        if True:\n",
        "tests/test_grammars.py -k waited_for",
    ),
    Mutation(
        "a matcher keeps what a pause has dropped",
        "engine/scheduler/requests.py",
        "self.matcher.rewind(",
        "abs(",
        "tests/test_grammars.py -k forgets_what_is_dropped",
    ),
    Mutation(
        "a best-first tree goes on below the first path of a level only",
        "reference/tree_decoding.py",
        "chosen = _best(children, min(nodes - 1, children.shape[1]))",
        "chosen = _best(children, k)",
        "tests/test_tree_decoding.py -k of_a_heap",
    ),
    Mutation(
        "a selector's tokens are scored after the wrong one",
        "engine/drafts/block.py",
        "before = torch.cat((root[:, :, None].expand(-1, -1, width), among[:, :-1]), dim=1)",
        "before = among",
        "tests/test_block_drafter.py -k of_every_step",
    ),
    Mutation(
        "a path goes on from the state of another",
        "engine/drafts/block.py",
        "states = states.gather(1, nodes.parents[:, :, None].expand(-1, -1, states.shape[-1]))",
        "states = states[:, :1].expand(-1, nodes.parents.shape[1], -1)",
        "tests/test_block_drafter.py -k all_that_was",
    ),
    Mutation(
        "tokens of a row that are not corrected lose their probability",
        "engine/drafts/block.py",
        "if correction.keeps_rest:",
        "if False:",
        "tests/test_block_drafter.py -k rest_keep",
    ),
    Mutation(
        "a graft shares the first node with its token, whatever its parent",
        "reference/grafting.py",
        "same = (parents - 1 == above[:, None]) & ",
        "same = ",
        "tests/test_grafting.py -k test_graft",
    ),
    Mutation(
        "committed tokens read the queries' matrix",
        "engine/model/mixers.py",
        "rows, queries=False)",
        "rows)",
        "tests/test_block_drafter.py -k cost_no_queries",
    ),
]


def main(argv: list[str] | None = None) -> int:
    parser = Parser("mutate.py", __doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of those to try; all if left out")
    jobs = min(os.cpu_count() or 1, 4)
    parser.add_argument("--jobs", type=whole(most=256), default=jobs, metavar="N", help=f"at a time (default: {jobs})")
    options = parser.parse_args(argv)
    chosen = [m for m in MUTATIONS if not options.names or any(part in m.name for part in options.names)]
    if not chosen:
        known = ", ".join(repr(mutation.name) for mutation in MUTATIONS)
        parser.error(f"names must be parts of {known}, got {', '.join(options.names)}")
    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = list(pool.map(attempt, chosen))
    print(f"{verdicts.count('killed')} of {len(chosen)} killed")
    return int(any(verdict != "killed" for verdict in verdicts))


def attempt(mutation: Mutation) -> str:
    """Try one mutation in a copy of the tree; prints and returns the verdict."""
    start = time.perf_counter()
    verdict = _verdict(mutation)
    print(f"{verdict:9} {time.perf_counter() - start:5.0f} s  {mutation.name}", flush=True)
    return verdict


def _verdict(mutation: Mutation) -> str:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        file = copy / "eagle_triton" / mutation.file
        source = file.read_text(encoding="utf-8")
        if source.count(mutation.text) != 1:
            return "OUTDATED"
        file.write_text(source.replace(mutation.text, mutation.broken), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *_arguments(mutation.tests)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
        try:
            result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=LONGEST)
        except subprocess.TimeoutExpired:
            return "HUNG"
    if result.returncode == 1:
        return "killed"
    return "SURVIVED" if result.returncode == 0 else f"ERROR {result.returncode}"


def _arguments(tests: str) -> list[str]:
    path, _, expression = tests.partition(" -k ")
    return [path, "-k", expression] if expression else [path]


if __name__ == "__main__":
    sys.exit(run_program(main))
