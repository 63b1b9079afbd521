"""Whether ranks that share the embedded pair decode as one process does, and stay together for thousands of steps.

    torchrun --nproc-per-node 2 tools/decode_on_ranks.py --output results/decode-on-ranks-h200.json

Each rank decodes alone with the whole pair in fp32, greedily, by sampling, over trees and plainly, alone and in a
batch; then all share the pair and must give the same tokens. Then they decode --steps steps in --dtype, in a batch
with requests that come and go, and compare all reports. Each rank needs a GPU of its own, or --device cpu. The exit
status is 1 if anything differs.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_triton.benchmarks.modes import add_options
from eagle_triton.command_line import Parser, run_program, whole

SLOTS = 3
COMPARED_EVERY = 500  # steps
ROWS = 1024  # of a slot in the batch with requests that come and go


def main(argv: list[str] | None = None) -> int:
    parser = Parser("decode_on_ranks.py", __doc__)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where ranks run (default: cuda)")
    add("--prompts", type=whole(1, 100), default=8, metavar="N", help="that are decoded alone and shared (default: 8)")
    add("--new-tokens", type=whole(1, 900), default=64, metavar="N", help="of each of these requests (default: 64)")
    add("--steps", type=whole(1), default=10_000, metavar="N", help="their reports are compared (default: 10000)")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of those steps (default: bfloat16)")
    add_options(parser, "--output --commit")
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.stop("is started by torchrun, one process for each rank")
    with parser.explains():
        import torch
        import torch.distributed as dist

        from eagle_triton import UnsupportedModelError
        from eagle_triton.benchmarks.record import Record, publish

    device = torch.device("cpu")
    if args.device == "cuda":
        if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
            parser.stop(f"--device cuda: there are {torch.cuda.device_count()} GPUs, and each rank needs one")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
    try:
        row, note, wrong = same_tokens(device, args.prompts, args.new_tokens)
    except UnsupportedModelError as error:  # the ranks do not divide its heads, for example
        parser.stop(str(error))
    rows = [row]
    row, apart = same_reports(device, args.steps, getattr(torch, args.dtype))
    rows.append(row)
    notes = [note, *(f"FAIL: {sentence}" for sentence in (*wrong, *apart))]
    if dist.get_rank() == 0:
        record = Record.of("decode-on-ranks", device, args, rows, notes)
        publish(record, record.json(), parser.prog, output=args.output)
    dist.barrier()
    dist.destroy_process_group()
    return int(bool(wrong or apart))


def same_tokens(device: Any, count: int, new_tokens: int) -> tuple[dict[str, Any], str, list[str]]:
    """A row of the requests that were decoded, how sums were exchanged, and what differs on any rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.utils.rnn import pad_sequence

    from eagle_triton import EaModel, optimize_eagle_with_triton
    from eagle_triton.demo import demo_prompts

    found: list[dict[str, Any]] = []
    note = ""
    for options in ({}, {"tp_plan": "auto"}):
        model = EaModel.from_pretrained("demo", dtype=torch.float32, **options)
        if not options:
            model = model.to(device)
        prompts = [model.tokenizer(text, return_tensors="pt").input_ids.to(device) for text in demo_prompts(count)]
        results: dict[str, Any] = {}
        _, originals = optimize_eagle_with_triton(model)
        with originals:
            note = next((row.reason for row in originals.report() if row.path == "ranks"), note)
            for place, prompt in enumerate(prompts):
                for name, decode, sampling in (
                    ("tree", model.eagenerate, {}),
                    ("plain", model.naivegenerate, {}),
                    ("sampled tree", model.eagenerate, {"temperature": 0.8, "top_p": 0.9}),
                ):
                    torch.manual_seed(place)
                    results[f"{name}, prompt {place}"] = decode(prompt, max_new_tokens=new_tokens, **sampling)[0]
            for start in range(0, count, SLOTS):
                batch = [prompt[0] for prompt in prompts[start : start + SLOTS]]
                ids, mask = (
                    pad_sequence(rows, batch_first=True, padding_side="left")
                    for rows in (batch, list(map(torch.ones_like, batch)))
                )
                for name, sampling in (("batch", {}), ("sampled batch", {"do_sample": True, "seed": start})):
                    rows = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, **sampling)
                    results[f"{name} from prompt {start}"] = rows
        found.append(results)
    alone, shared = found
    wrong = [
        f"rank {dist.get_rank()}, {name}: other tokens than alone"
        for name in alone
        if not torch.equal(alone[name], shared[name])
    ]
    row = {"variant": "tokens of one process", "ranks": dist.get_world_size(), "compared": len(alone)}
    return {**row, "differ": len(wrong)}, note, _of_all(wrong)


def same_reports(device: Any, steps: int, dtype: Any) -> tuple[dict[str, Any], list[str]]:
    """A row of the steps, requests and tokens of a batch, and after which steps the ranks' reports differed."""
    import torch
    import torch.distributed as dist

    from eagle_triton import EaModel
    from eagle_triton.demo import demo_prompts
    from eagle_triton.engine.sampling_params import SamplingParams
    from eagle_triton.engine.scheduler.batch import Batch
    from eagle_triton.engine.scheduler.requests import Request
    from eagle_triton.engine.tree_spec import PLAIN, TreeSpec
    from eagle_triton.inference import EAGLEInference

    model = EaModel.from_pretrained("demo", dtype=dtype, tp_plan="auto")
    engine = EAGLEInference(None, model).engine
    prompts = [model.tokenizer(text, return_tensors="pt").input_ids[0] for text in demo_prompts(100)]
    generator, spec, asked, wrong = torch.Generator().manual_seed(0), TreeSpec.dynamic(60, 7, 10), 0, []

    def request() -> Request:
        nonlocal asked
        asked += 1
        length, new = (int(torch.randint(8, most, (1,), generator=generator)) for most in (200, 600))
        prompt = prompts[asked % len(prompts)][:length].to(device)
        sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=asked) if asked % 2 else SamplingParams()
        return Request(prompt, new, sampling)

    digest, tokens = hashlib.sha256(), 0
    with torch.no_grad(), Batch(engine, SLOTS, spec, ROWS) as batch:
        start = time.perf_counter()
        for step in range(1, steps + 1):
            for _ in batch.free:
                batch.admit(request())
            batch.spec = PLAIN if step % 50 == 0 else spec
            tokens += sum(len(progress.tokens) for progress in batch.step())
            digest.update(batch.state.report.cpu().numpy().tobytes())
            compared = step % COMPARED_EVERY == 0 or step == steps
            if compared and len(set(_of_all([digest.hexdigest()]))) > 1:
                wrong.append(f"the ranks' reports are not the same after {step} steps")
                break
        seconds = time.perf_counter() - start
    row = {"variant": "reports of all ranks", "ranks": dist.get_world_size(), "steps": step, "requests": asked}
    return {**row, "tokens": tokens, "seconds": seconds, "differ": len(wrong)}, wrong


def _of_all(texts: list[str]) -> list[str]:
    """The texts of all ranks."""
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, texts)
    return [text for each in found for text in each]


if __name__ == "__main__":
    sys.exit(run_program(main))
