"""EaModel: a Hugging Face causal LM with an EAGLE draft head, in plain PyTorch.

One decode step: the head drafts a tree, the target scores all its nodes in one forward, the longest path that agrees
with the target is kept, and its features feed the next tree. Nothing else is optimised here: tests compare the engine
with this model.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .checks import check_fits, check_logits, check_prompt
from .families import text_config
from .generate_arguments import GenerateArguments, check_sampling_is_meant, make_generator, original_stop_ids
from .head_loading import check_fit, fit_head, is_sharded, load_head
from .heads import DraftHead, Eagle3Head
from .loading import HEAD_FOLDERS, TARGET_FOLDER, HubArguments, load_target, load_tokenizer, locate, read_target_config
from .target import (
    TargetCache,
    cache_argument,
    check_architecture,
    decompress,
    default_feature_layers,
    language_model,
    logit_head,
    run_target,
    without_capture_hooks,
)
from .tree import TreeChoices
from .verify import children_of, choose, eagle_warpers, generate_warpers, verify_tree

# total_token=-1 chooses the size with the least target time per expected gain (the second number).
TREE_SIZES = ((40, 1.0), (48, 1.05), (50, 1.07), (56, 1.1), (60, 1.13))


class EaModel(nn.Module):
    """A target and a draft head that decode together.

    `eagenerate`, `ea_generate`, `naivegenerate` and `naive_generate` have the arguments, stop rules and return values
    of the original EaModel: one sequence, and the last step's tokens beyond a stop are kept. `generate` takes Hugging
    Face's arguments and stops exactly. `accept_lengths` lists the accepted drafts of each decode step of the last
    generated sequence.
    """

    base_model: Any
    ea_layer: DraftHead

    def __init__(
        self,
        base_model: Any,
        ea_layer: DraftHead,
        tokenizer: Any | None = None,
        base_model_name_or_path: str = "",
    ) -> None:
        """Make it of loaded parts. Raises ValueError if the target is not supported or the head does not fit it."""
        super().__init__()
        check_architecture(base_model.config)
        use_eagle3 = isinstance(ea_layer, Eagle3Head)
        check_fit(ea_layer.config, base_model.config, use_eagle3)
        ea_layer.init_tree()
        self.base_model = base_model
        self.ea_layer = ea_layer
        self.tokenizer = tokenizer
        self.config = base_model.config
        self.vocab_size, self.hidden_size = base_model.get_input_embeddings().weight.shape
        self.base_model_name_or_path = base_model_name_or_path
        self.use_eagle3 = use_eagle3
        self.feature_layers: tuple[int, ...] | None = None
        if use_eagle3:
            layers = ea_layer.config.feature_layers
            self.feature_layers = layers or default_feature_layers(text_config(base_model.config).num_hidden_layers)
        self.accept_lengths: list[int] = []

    @classmethod
    def from_pretrained(
        cls,
        base_model_path: str,
        ea_model_path: str | None = None,
        use_eagle3: bool | None = True,
        total_token: int | None = None,
        depth: int | None = None,
        top_k: int | None = None,
        threshold: float | None = None,
        tree_choices: TreeChoices | None = None,
        *,
        ea_revision: str | None = None,
        **kwargs: Any,
    ) -> "EaModel":
        """Load a target and its draft head.

        base_model_path: a directory or hub id of a model of any family in `models/families.py` that is not recurrent;
        "demo" or "demo-moe" for those that ship with this package; or, without `ea_model_path`, a directory written by
        `save_pretrained`.
        ea_model_path: a directory or hub id of the head, in the layout of SafeAILab or of speculators/vLLM/SGLang.
        use_eagle3: True: an EAGLE-3 head, False: EAGLE-1/2, None: decided by its weights.
        total_token: nodes of a tree, root included (60); -1 chooses from 40, 48, 50, 56 and 60 by measuring the target.
        depth, top_k: beam passes (7) and beam width (10) of a dynamic tree. tree_choices: rank paths of a fixed tree.
        threshold: not used (1). None in any of these: the value that `save_pretrained` stored, else the number in
        brackets. If total_token, depth or top_k is given, the tree is dynamic, even if a fixed one was stored.
        kwargs go to the target's `from_pretrained`; `dtype` and `torch_dtype` both work, the default is fp32. With
        `device_map` (for one device: "cuda", {"": 0}, or "auto" on a machine with one) weights are read straight to the
        device, without a copy in host memory, and the head is put there too. `token`, `cache_dir`, `local_files_only`,
        `force_download` and `proxies` apply to target, tokenizer and head; `revision`, `subfolder`,
        `trust_remote_code` and `code_revision` to the target and its tokenizer. `ea_revision` is the head's revision;
        None: `revision` if the head is in the target's repository.
        Raises FileNotFoundError and ValueError; head and configurations are checked before the target is read.
        """
        target_path, head_path, use_eagle3 = locate(base_model_path, ea_model_path, use_eagle3)
        hub = HubArguments.of(target_path, head_path, ea_revision, kwargs)
        measure = total_token == -1
        asked = dict(
            total_token=60 if measure else total_token,
            depth=depth,
            top_k=top_k,
            threshold=threshold,
            tree_choices=tree_choices,
        )
        head = load_head(head_path, use_eagle3, read_target_config(target_path, **hub.target), asked, **hub.head)
        base_model: Any = load_target(target_path, **kwargs)
        if measure and is_sharded(base_model):
            raise ValueError(
                "total_token must be a number of nodes for a target that ranks share (tp_plan), got -1: that measures "
                "the target, and each rank would measure a different time"
            )
        tokenizer = load_tokenizer(target_path, **hub.target)

        model = cls(base_model, fit_head(head, base_model), tokenizer, str(base_model_path)).eval()
        if measure:
            model.ea_layer.total_tokens = model._fastest_tree_size() - 1
        return model

    def save_pretrained(self, directory: str | Path) -> None:
        """Write target, tokenizer, head and tree parameters; `from_pretrained(directory)` reads them back."""
        directory = Path(directory)
        self.base_model.save_pretrained(directory / TARGET_FOLDER)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory / TARGET_FOLDER)
        head = self.ea_layer
        folder = directory / HEAD_FOLDERS[self.use_eagle3]
        folder.mkdir(parents=True, exist_ok=True)
        fixed = None if head.tree_choices is None else [list(path) for path in head.tree_choices]
        config = {name: value for name, value in head.config.to_dict().items() if value is not None}
        config["eagle_aux_hidden_state_layer_ids"] = config.pop("feature_layers", None)
        config["model_type"] = "llama"
        config["tree"] = dict(total_token=head.total_tokens + 1, depth=head.depth, top_k=head.top_k, tree_choices=fixed)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tensors = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def __getstate__(self) -> dict[str, Any]:
        """For pickling, `torch.save` and deep copies; without transformers' hooks, which cannot be pickled."""
        modules = {**self._modules, "base_model": without_capture_hooks(self.base_model)}
        return {**vars(self), "_modules": modules}

    def __copy__(self) -> "EaModel":
        """A shallow copy, which shares the target itself. An optimised model refuses by its own `__getstate__`."""
        twin = object.__new__(type(self))
        twin.__dict__.update(vars(self).get("__getstate__", lambda: vars(self))())
        return twin

    @property
    def device(self) -> torch.device:
        """The device for token ids."""
        return self.base_model.get_input_embeddings().weight.device

    def get_tokenizer(self) -> Any | None:
        """The target's tokenizer, None if its directory had none."""
        return self.tokenizer

    @property
    def logit_head(self) -> Callable[[Tensor], Tensor]:
        """Logits [..., V] of the target's last hidden state [..., H]: `lm_head`, then what the family applies to it."""
        return logit_head(self.base_model)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any | None = None,
        output_orig: bool = False,
        position_ids: Tensor | None = None,
    ) -> tuple[Any, ...]:
        """Run the target only, with the arguments of its own forward.

        Returns (outputs, last hidden state [B, T, H]), or with `output_orig` (outputs, logits [B, T, V], last hidden
        state). With an EAGLE-3 head, `outputs.hidden_states` holds the feature layers only.
        """
        decompress(self.base_model)
        body = language_model(self.base_model)
        outputs = body(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            output_hidden_states=self.use_eagle3,
            **{cache_argument(body.forward): past_key_values},
        )
        if self.feature_layers is not None:
            outputs.hidden_states = tuple(outputs.hidden_states[layer] for layer in self.feature_layers)
        hidden = outputs.last_hidden_state
        return (outputs, self.logit_head(hidden), hidden) if output_orig else (outputs, hidden)

    # --- the original interface ---

    def eagenerate(
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
    ) -> Tensor | tuple[Tensor, int, int]:
        """Decode speculatively from a prompt [1, L] int64.

        Stops after the step that produced the end token (with `is_llama3` also <|eot_id|>), more than `max_new_tokens`
        tokens, or a sequence longer than `max_length` minus the drafts of a tree minus 10. The tokens that this step
        accepted beyond the stop are kept. temperature 0 is greedy; top_p and top_k apply if positive.
        Returns the sequence [1, L + new], or with `log` (sequence, new tokens, index of the last step).
        Raises ValueError for a prompt that is empty, out of range or does not fit, RuntimeError for NaN logits.
        """
        steps = self.ea_generate(input_ids, temperature, top_p, top_k, max_new_tokens, max_length, log, is_llama3)
        return _last(steps, input_ids.to(self.device, torch.long), log)

    def ea_generate(
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
    ) -> Iterator[Tensor]:
        """`eagenerate`, step by step: yields the sequence [1, L + new] after each step. `log` has no effect."""
        check_prompt(input_ids, self.vocab_size, max_batch=1)
        check_fits(input_ids.shape[1], self.ea_layer.total_tokens + 1, max_length)
        stop = original_stop_ids(self, is_llama3)
        warpers = eagle_warpers(temperature, top_p, top_k)
        steps = (sequence for sequence, _ in islice(self._speculate(input_ids, warpers), 1, None))
        return self._original_stops(steps, input_ids, stop, max_new_tokens, max_length)

    def naivegenerate(
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
    ) -> Tensor | tuple[Tensor, int, int]:
        """Decode with the target only, one token per step; otherwise like `eagenerate`."""
        steps = self.naive_generate(input_ids, temperature, top_p, top_k, max_new_tokens, max_length, log, is_llama3)
        return _last(steps, input_ids.to(self.device, torch.long), log)

    def naive_generate(
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
    ) -> Iterator[Tensor]:
        """`naivegenerate`, token by token: yields the sequence after each token. `log` has no effect."""
        check_prompt(input_ids, self.vocab_size, max_batch=1)
        check_fits(input_ids.shape[1], 1, max_length)
        stop = original_stop_ids(self, is_llama3)
        warpers = eagle_warpers(temperature, top_p, top_k)
        return self._original_stops(self._decode(input_ids, warpers), input_ids, stop, max_new_tokens, max_length)

    # --- our own interface ---

    def generate(
        self,
        input_ids: Tensor,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        attention_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Decode speculatively and stop exactly.

        input_ids: [B, L] int64; the sequences are decoded one after another. attention_mask: [B, L], 0 marks padding
        on the left or right of a prompt. Each sequence ends with its first end token (`eos_token_id`; default: the
        generation config's, else the tokenizer's), or after `max_new_tokens`, or at `max_length` tokens with the
        prompt. max_new_tokens takes precedence; without both, 512 new tokens. Temperature 0 is greedy. Sampling applies
        temperature, top-k, top-p, min-p in this order. `generator` or `seed` makes it repeatable; otherwise torch's
        global generator is used. No sequence exceeds the target's `max_position_embeddings`.
        Returns [B, longest] int64: prompts without their padding, new tokens, then `pad_token_id` on the right.
        Raises ValueError for bad arguments, among them a prompt longer than the positions, and sampling options without
        `do_sample`; RuntimeError for NaN logits.
        """
        check_sampling_is_meant(do_sample, temperature, top_p, top_k, min_p)
        request = GenerateArguments.resolve(
            self, input_ids, attention_mask, max_length, max_new_tokens, eos_token_id, pad_token_id
        )
        warpers = generate_warpers(temperature, top_k, top_p, min_p) if do_sample or temperature == 0 else None
        generator = make_generator(seed, generator, self.device)
        return request.pad(
            [
                self._generate_exactly(prompt[None], new, request.stop_ids, warpers, generator)
                for prompt, new in zip(request.prompts, request.new_tokens, strict=True)
            ]
        )

    def _generate_exactly(self, prompt: Tensor, new: int, stop: frozenset[int], warpers: Any, generator: Any) -> Tensor:
        """One sequence of at most L + new tokens, from a prompt [1, L]."""
        self.accept_lengths = []
        sequence, length = prompt.to(self.device, torch.long), prompt.shape[1]
        done = 0  # new tokens checked so far
        for committed, root in self._speculate(prompt, warpers, generator) if new > 0 else ():
            sequence = torch.cat((committed, root[None]), dim=1)
            fresh = sequence[0, length + done :].tolist()
            ends = [i for i, token in enumerate(fresh) if token in stop]
            if ends:
                new = min(new, done + ends[0] + 1)
            done += len(fresh)
            if done >= new:
                break
        return sequence[0, : length + new]

    # --- decoding ---

    @torch.no_grad()
    def _speculate(self, input_ids: Tensor, warpers: Any, generator: Any = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the sequence and the next token [1]: after the prompt and after each decode step, without end."""
        self.accept_lengths = []
        self.ea_layer.reset_kv()
        cache = TargetCache()
        sequence = input_ids.to(self.device, torch.long)
        head = self.logit_head
        hidden, features = run_target(self.base_model, sequence, cache, feature_layers=self.feature_layers)
        logits = head(hidden[0, -1])
        check_logits(logits)
        root = choose(logits, warpers, generator).to(self.device)
        yield sequence, root
        while True:
            tokens, _, tree_mask, depths = self.ea_layer.topK_genrate(
                features, torch.cat((sequence, root[None]), dim=1), head, warpers
            )
            length = sequence.shape[1]
            tokens, depths = tokens.to(self.device), depths.to(self.device)
            visible = tree_mask[0, 0].bool().to(self.device)
            hidden, features = run_target(self.base_model, tokens, cache, length + depths, visible, self.feature_layers)
            logits = head(hidden[0])
            check_logits(logits)
            path, root = verify_tree(tokens[0], children_of(visible, depths), logits, warpers, generator)

            nodes = torch.tensor(path, device=self.device)
            cache.keep(torch.cat((torch.arange(length, device=self.device), length + nodes)))
            features = features[:, nodes.to(features.device)]
            sequence, root = torch.cat((sequence, tokens[:, nodes]), dim=1), root.to(self.device)
            self.accept_lengths.append(len(path) - 1)
            yield sequence, root

    @torch.no_grad()
    def _decode(self, input_ids: Tensor, warpers: Any, generator: Any = None) -> Iterator[Tensor]:
        """Decodes with the target only. Yields the sequence after each token, without end."""
        self.accept_lengths = []
        cache = TargetCache()
        sequence = fed = input_ids.to(self.device, torch.long)
        while True:
            hidden, _ = run_target(self.base_model, fed, cache)
            logits = self.logit_head(hidden[0, -1])
            check_logits(logits)
            fed = choose(logits, warpers, generator).to(self.device)[None]
            sequence = torch.cat((sequence, fed), dim=1)
            self.accept_lengths.append(0)
            yield sequence

    def _original_stops(
        self, steps: Iterator[Tensor], input_ids: Tensor, stop: frozenset[int], max_new_tokens: int, max_length: int
    ) -> Iterator[Tensor]:
        """Yields `steps` up to the one after which the original loop ends."""
        limit = max_length - self.ea_layer.total_tokens - 10
        for sequence in islice(steps, max(limit, 0)):
            yield sequence
            new = sequence[0, input_ids.shape[1] :].tolist()
            if not stop.isdisjoint(new) or len(new) > max_new_tokens or sequence.shape[1] > limit:
                return

    @torch.no_grad()
    def _fastest_tree_size(self, rounds: int = 20) -> int:
        """The tree size with the least target time per expected gain, measured here."""

        def seconds(nodes: int) -> float:
            ids = torch.arange(nodes, device=self.device)[None] % self.vocab_size
            synchronise = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
            synchronise()
            start = time.perf_counter()
            for _ in range(rounds):
                self.base_model(ids)
                synchronise()
            return time.perf_counter() - start

        return min(TREE_SIZES, key=lambda size: seconds(size[0]) / size[1])[0]


def _last(steps: Iterable[Tensor], start: Tensor, log: bool) -> Tensor | tuple[Tensor, int, int]:
    """The result of a generation in the original methods' form; `start` [1, L] if there was no step."""
    sequence, index = start.clone(), -1
    for index, sequence in enumerate(steps):  # noqa: B007
        pass
    return (sequence, sequence.shape[1] - start.shape[1], index) if log else sequence
