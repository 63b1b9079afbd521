"""Prompts for comparing drafts: what each kind holds, the same every time, and what is refused."""

import pytest
from transformers import AutoTokenizer

from eagle_triton.benchmarks.drafting_work import EDITED, KINDS, work
from eagle_triton.demo import demo_directory


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_directory("target"))


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_the_same_for_a_seed(kind, tokenizer):
    first, again, other = (work(kind, tokenizer, 8, seed) for seed in (0, 0, 1))
    assert len(first) == 8 and first == again != other
    assert work(kind, tokenizer, 4, 0)[:2] == first[:2], "fewer are the first of more"
    assert len(set(map(tuple, first))) == (4 if kind == "warm" else 8)


def test_prose_ends_inside_a_docstring(tokenizer):
    for prompt in work("prose", tokenizer, 20, 0):
        *header, last = tokenizer.decode(prompt).split("\n")
        assert header[0].startswith(("def ", "async def ", "class "))
        assert last.lstrip().lstrip("rR").startswith(('"""', "'''", '"', "'")) and not last.endswith('"""')


def test_an_edit_holds_its_beginning_twice(tokenizer):
    for prompt in work("edit", tokenizer, 10, 0):
        source, again = tokenizer.decode(prompt).rsplit("\n\n\n", 1)
        assert EDITED[0] <= len(tokenizer(source).input_ids) <= EDITED[1]
        assert (
            again.count("_again") == 1 and source.startswith(again.replace("_again", "")) and len(again) < len(source)
        )


def test_warm_prompts_come_a_second_time(tokenizer):
    prompts = work("warm", tokenizer, 6, 3)
    assert prompts[:3] == prompts[3:] == work("prose", tokenizer, 3, 3)


@pytest.mark.parametrize(
    ("kind", "count", "message"),
    [
        ("poems", 1, "kind must be one of prose, edit, warm, got 'poems'"),
        ("prose", 0, "count must be at least 1"),
        ("warm", 3, "and even for warm, got 3"),
        ("edit", 10**6, r"count must be at most \d+ for edit, got 1000000"),
        ("warm", 10**6, r"count must be at most \d+ for warm, got 1000000"),
    ],
)
def test_what_is_refused(kind, count, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        work(kind, tokenizer, count, 0)
