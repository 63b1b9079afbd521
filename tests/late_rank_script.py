"""Two ranks of which one after the other is late, by more than a step may take: `late_rank_script.py FOLDER`.

Run by tests/test_tensor_parallel.py.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import torch.distributed as dist

from eagle_triton import EaModel, optimize_eagle_with_triton, optimize_with_triton
from eagle_triton.engine import ranks
from eagle_triton.inference import EAGLEInference
from tests.tensor_parallel_script import TREE, save
from tests.tiny import random_prompt

SECONDS = 1.0  # that ranks wait within a step; the late one takes a third more


def main(argv: list[str]) -> int:
    """Decode behind each delay. An exception ends both ranks."""
    folder = argv[0]
    ranks.STEP_SECONDS = SECONDS
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        save(Path(folder), "pair")
    dist.barrier()
    model = EaModel.from_pretrained(f"{folder}/pair", tp_plan="auto", **TREE)
    prompt = random_prompt(9)

    late = itertools.cycle(range(2))  # what comes next is late on the other rank

    def be_late() -> None:
        if dist.get_rank() == next(late):
            time.sleep(1.33 * SECONDS)

    be_late()
    with optimize_eagle_with_triton(model):
        be_late()
        model.eagenerate(prompt, max_new_tokens=4)
    with optimize_with_triton(model.base_model):
        be_late()
        model.base_model.generate(prompt, max_new_tokens=4, do_sample=False)
    be_late()
    inference = EAGLEInference(None, model)
    inference.generate([prompt[0]], 4)
    for _ in range(2):
        with inference.session(64) as session:
            be_late()
            if dist.get_rank():
                session.follow()
                continue
            index = session.submit(prompt, 40)
            session.step()
            session.cancel(index)
            time.sleep(1.33 * SECONDS)  # nothing runs, so the other waits
            session.submit(prompt, 4)
            while not session.idle:
                session.step()
    if dist.get_rank() == 0:
        print("one rank after the other was late", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
