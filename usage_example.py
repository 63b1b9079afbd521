"""Optimise a target and its draft with one call, generate, and restore them with another.
Exit code 0: the tokens are the same throughout (in fp32); 1: they are not; 2: a wrong argument."""

import argparse
import time


def main(argv: list[str] | None = None, new_tokens: int = 100) -> int:
    parser = argparse.ArgumentParser("usage_example.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="demo", help="directory or hub id of the target; default: demo")
    parser.add_argument("--draft", help="of its EAGLE head or block drafter, such as demo-block; or mtp, suffix, ngram")
    args = parser.parse_args(argv)
    import torch  # here, so that --help does not wait for it

    from eagle_triton import EAGLEConfig, EAGLEInference, EaModel, optimize_eagle_with_triton, optimize_with_triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1 if args.model == "demo" else torch.get_num_threads())  # more make so small a model slower
    try:  # an EaModel has its head; a block drafter lies beside its target
        pair = EAGLEInference.from_pretrained(args.model, args.draft, EAGLEConfig(dtype=torch.float32), device).pair
    except (OSError, ValueError) as error:
        parser.error(str(error))
    model, tokenizer, draft = pair.target_model, pair.tokenizer, pair.draft_model or args.draft  # "suffix" is no model
    inputs = tokenizer("def read_lines(path):\n    ", return_tensors="pt").input_ids.to(device)
    outputs = []
    for name in ("original", "optimised", "restored"):
        originals = None
        if name == "optimised":
            with_head = isinstance(model, EaModel)
            found = optimize_eagle_with_triton(model) if with_head else optimize_with_triton(model, draft)
            originals = found.originals
        model.generate(inputs, max_new_tokens=new_tokens, do_sample=False)  # the first call compiles and captures
        start = time.perf_counter()
        outputs.append(model.generate(inputs, max_new_tokens=new_tokens, do_sample=False).tolist())
        print(f"{name:9} {(len(outputs[-1][0]) - inputs.shape[1]) / (time.perf_counter() - start):7.1f} tokens/s")
        if originals is not None:
            print(originals.report().title)
            originals.restore()
    same = outputs.count(outputs[0]) == 3
    print(f"{tokenizer.decode(outputs[0][0])}\nsame tokens on {device}: {'yes' if same else 'NO'}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
