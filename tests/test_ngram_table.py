"""Counted n-grams on the device: the kernels against their references, and both against counts in dictionaries."""

import itertools

import pytest
import torch

from eagle_triton.operands.ngram_table import NgramTable, new_ngram_table
from eagle_triton.ops import ngram_table as kernels
from eagle_triton.reference import ngram_table as reference
from eagle_triton.speculative_decoding import NGramStorage, OneLevelNGramStorage

STORAGES = {"basic": NGramStorage, "onelevel": OneLevelNGramStorage}


def lengths_of(storage: str, n: int) -> tuple[int, int]:
    """The shortest context that a storage counts, and of how many lengths."""
    return (1, n - 1) if storage == "basic" else (n - 1, 1)


def ints(*values: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def drafts_of(storage, text: list[int], places: int) -> list[int]:
    """What a storage goes on with up to the first unknown context, and -1."""
    drafts: list[int] = []
    while len(drafts) < places:
        token, known = storage.next_token(torch.tensor([text + drafts]))
        if not known:
            break
        drafts.append(int(token))
    return drafts + [-1] * (places - len(drafts))


def same(mine: NgramTable, theirs: NgramTable) -> bool:
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(mine, theirs, strict=True))


class Text:
    """A sequence that is counted step by step, in a storage and in what is handed to a slot."""

    def __init__(self, generator, storage: str, n: int, fillers: int, weight: float, columns: int = 70):
        self.generator, self.fillers, self.weight = generator, fillers, weight
        self.vocabulary = self.number(max(fillers, 2), 13)
        self.storage = STORAGES[storage](n, self.vocabulary)
        words = [torch.randint(self.vocabulary, (self.number(1, 8),), generator=generator) for _ in range(3)]
        self.tokens = torch.cat([words[self.number(0, 3)] for _ in range(columns)])[:columns]
        self.length = 0

    def number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=self.generator))

    def begin(self) -> None:
        self.length = self.number(8, 20)
        self.storage.initialize(self.tokens[None, : self.length])

    def step(self, most: int) -> torch.Tensor:
        """Grow by up to `most` tokens: what was guessed in place of each, best first, int64 [most, fillers]."""
        guesses = torch.stack([torch.randperm(self.vocabulary, generator=self.generator) for _ in range(most)])
        guesses = guesses[:, : self.fillers]
        for guess in guesses[: self.number(1, most + 1)]:
            context, token = self.tokens[None, : self.length], self.tokens[self.length]
            self.storage.update(context, token.view(1, 1))
            if self.fillers > 1:
                self.storage.update(context, guess[None], weight=self.weight)
            self.length += 1
        return guesses

    def drafts(self, places: int) -> list[int]:
        return drafts_of(self.storage, self.tokens[: self.length].tolist(), places)


FILLERS = [(1, 1.0), (3, 0.0), (3, 0.5), (3, 0.1), (10, 1.0)]  # how many there are with the token itself, their weight
KERNEL_CASES = [  # each n, storage and weight
    ("basic", 2, 3, 0.5), ("basic", 3, 10, 1.0), ("basic", 4, 1, 1.0), ("basic", 5, 3, 0.1),
    ("onelevel", 2, 3, 0.0), ("onelevel", 3, 3, 0.5), ("onelevel", 4, 10, 1.0), ("onelevel", 5, 1, 1.0),
]  # fmt: skip


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("n", [2, 3, 4, 5])
@pytest.mark.parametrize(("fillers", "weight"), FILLERS)
def test_drafts_are_those_of_the_storages_step_by_step(storage, n, fillers, weight):
    """Ties, fillers and their weights included; several sequences of different lengths grow side by side."""
    step_by_step(reference, "cpu", (storage, n, fillers, weight), batch=3, rounds=12)


@pytest.mark.parametrize(("storage", "n", "fillers", "weight"), KERNEL_CASES)
def test_the_kernels_drafts_are_too(device, storage, n, fillers, weight):
    batch, rounds = (8, 12) if device == "cuda" else (1, 2)
    step_by_step(kernels, device, (storage, n, fillers, weight), batch, rounds)


def step_by_step(module, device: str, case: tuple[str, int, int, float], batch: int, rounds: int) -> None:
    """Count sequences that grow, and compare what is drafted behind each step with what their storages know."""
    storage, n, fillers, weight = case
    generator, most, found = torch.Generator().manual_seed(100 * n + fillers), 3, 0
    shortest, levels = lengths_of(storage, n)
    texts = [Text(generator, *case) for _ in range(batch)]
    table = new_ngram_table(batch, levels, 70, 70 * (1 + fillers), torch.device(device))
    tokens = torch.stack([text.tokens for text in texts]).to(device)
    before = [0] * batch
    for step in range(rounds + 1):
        guesses = None
        if step == 0:
            for text in texts:
                text.begin()
        else:
            guesses = torch.stack([text.step(most) for text in texts]).to(device)
        after = [text.length for text in texts]
        first, end = ints(*before, device=device), ints(*after, device=device)
        module.count_ngrams(table, shortest, tokens, first, end, guesses if fillers > 1 else None, weight)
        drafts = module.counted_drafts(table, shortest, tokens, end - 1, 6).tolist()
        assert drafts == [text.drafts(6) for text in texts]
        found += sum(token >= 0 for row in drafts for token in row)
        before = after
    assert found > 3 * batch or rounds == 2, "little was known: the test shows little"


@pytest.mark.parametrize(("storage", "n", "weight"), [("basic", 3, 0.3), ("onelevel", 4, 1.0)])
def test_the_kernel_keeps_the_same_tables_as_the_reference(device, storage, n, weight):
    """Bit for bit, in tables that become full, in several slots at once."""
    generator = torch.Generator().manual_seed(n)
    shortest, levels = lengths_of(storage, n)
    tokens = torch.randint(9, (3, 60), generator=generator)
    tables = [new_ngram_table(3, levels, 16, 24, torch.device(where)) for where in ("cpu", device)]
    assert tables[0].contexts.shape[2] == 32 and tables[0].grams.shape[2] == 64
    for first, end in (((0, 0, 0), (18, 1, 9)), ((18, 1, 9), (21, 1, 11)), ((21, 1, 11), (22, 4, 11))):
        fillers = torch.randint(9, (3, 3, 2), generator=generator)
        for module, table, where in zip((reference, kernels), tables, ("cpu", device), strict=True):
            module.count_ngrams(
                table, shortest, tokens.to(where), ints(*first, device=where), ints(*end, device=where),
                fillers.to(where).mT.contiguous().mT, weight,
            )  # fmt: skip
        assert same(*tables)
        lengths = ints(*end) - 1
        drafts = kernels.counted_drafts(tables[1], shortest, tokens.to(device), lengths.to(device), 4).cpu()
        assert torch.equal(drafts, reference.counted_drafts(tables[0], shortest, tokens, lengths, 4))
    full = tables[0].used == torch.tensor([16, 32], dtype=torch.int32)
    assert full.any(), "nothing became full: the test shows less than it says"


@pytest.mark.parametrize("module", [reference, kernels], ids=["reference", "kernel"])
def test_a_full_table_learns_no_new_context_and_goes_on_counting(device, module):
    device = device if module is kernels else "cpu"
    table = new_ngram_table(1, 1, 16, 100, torch.device(device))
    row = [*range(17), 30, 40, 0, 9, 0, 9]  # 0 -> 1 first; 17 contexts up to the 16
    tokens = torch.tensor([row], device=device)
    module.count_ngrams(table, 1, tokens, ints(0, device=device), ints(19, device=device))
    assert table.used.tolist() == [[[16, 16]]]

    def drafted(token: int) -> list[int]:
        known = torch.tensor([[token]], device=device)
        return module.counted_drafts(table, 1, known, ints(0, device=device), 2).tolist()[0]

    assert (drafted(0), drafted(15), drafted(16), drafted(30)) == ([1, 2], [16, -1], [-1, -1], [-1, -1])
    module.count_ngrams(table, 1, tokens, ints(19, device=device), ints(23, device=device))
    assert drafted(0) == [9, 10] and table.used.tolist() == [[[16, 18]]]


@pytest.mark.parametrize("module", [reference, kernels], ids=["reference", "kernel"])
def test_a_table_full_of_grams_counts_those_it_has(device, module):
    device = device if module is kernels else "cpu"
    table = new_ngram_table(1, 1, 32, 16, torch.device(device))
    row = [0, *itertools.chain.from_iterable((token, 0) for token in range(1, 10)), 20, 0, 9, 0, 20]
    tokens = torch.tensor([row], device=device)
    module.count_ngrams(table, 1, tokens, ints(0, device=device), ints(len(row), device=device))
    assert table.used.tolist() == [[[9, 16]]]  # 0 -> 1, 1 -> 0, .. 8 -> 0: there is no room for 0 -> 9, nor for 9
    known = torch.tensor([[0, 0], [20, 9]], device=device)[:, :1]
    doubled = NgramTable(*(value.repeat(2, *[1] * (value.ndim - 1)) for value in table))
    assert module.counted_drafts(doubled, 1, known, ints(0, 0, device=device), 3).tolist() == [[1, 0, 1], [-1, -1, -1]]


@pytest.mark.parametrize("module", [reference, kernels], ids=["reference", "kernel"])
def test_slots_without_new_tokens_are_left_as_they_are(device, module):
    device = device if module is kernels else "cpu"
    tokens = torch.tensor([[1, 2, 1, 2, 3, 1]] * 3, device=device)
    table = new_ngram_table(3, 2, 40, 40, torch.device(device))
    module.count_ngrams(table, 1, tokens, ints(0, 0, 0, device=device), ints(4, 4, 4, device=device))
    before = [value.clone() for value in table]
    fillers = torch.full((3, 2, 2), 7, device=device)
    module.count_ngrams(table, 1, tokens, ints(4, 4, 4, device=device), ints(4, 6, 3, device=device), fillers)
    for old, new in zip(before, table, strict=True):
        assert torch.equal(old[::2], new[::2]) and not torch.equal(old[1], new[1])
    part = NgramTable(*(value[1:2] for value in table))  # of a batch, as requests enter it
    module.count_ngrams(part, 1, tokens[1:2], ints(0, device=device), ints(6, device=device))
    assert torch.equal(before[0][2], table.contexts[2])


@pytest.mark.parametrize("module", [reference, kernels], ids=["reference", "kernel"])
def test_numbers_by_hand(device, module):
    """The first to reach a count stays, n-grams back off to shorter contexts, every place of a draft is known."""
    device = device if module is kernels else "cpu"

    def drafts(storage, n, text, places=4):
        shortest, levels = lengths_of(storage, n)
        table = new_ngram_table(1, levels, 64, 64, torch.device(device))
        tokens = torch.tensor([text], device=device)
        module.count_ngrams(table, shortest, tokens, ints(0, device=device), ints(len(text), device=device))
        return module.counted_drafts(table, shortest, tokens, ints(len(text) - 1, device=device), places).tolist()[0]

    assert drafts("basic", 3, [1, 2, 3, 1, 2, 3, 1, 2]) == [3, 1, 2, 3]
    assert drafts("basic", 2, [7, 8, 7], 2) == [8, 7]
    assert drafts("basic", 5, [7, 8, 9, 4]) == [-1] * 4
    assert drafts("onelevel", 3, [7, 8, 7]) == [-1] * 4
    assert drafts("basic", 2, [5, 6, 5, 7, 5], 1) == [6] and drafts("basic", 2, [5, 6, 5, 7, 5, 7, 5], 1) == [7]
    assert drafts("basic", 2, [0, 0, 0], 2) == [0, 0]
    assert drafts("basic", 5, [2**31 - 2] * 6, 2) == [2**31 - 2] * 2
    assert drafts("basic", 3, [4], 2) == [-1, -1]


def test_contexts_that_fall_on_one_place_are_kept_apart(device):
    """Of 300 tokens many begin at the same of 32 places, and the last ones go round the end."""
    homes: dict[int, list[int]] = {}
    for token in range(300):
        homes.setdefault(reference._hash(reference._context_key([token])) % 32, []).append(token)
    crowd = homes[31][:5] + homes[30][:3]
    row = [token for member in crowd for token in (member, 500 + member)]
    tokens = torch.tensor([row])
    tables = []
    for module, where in ((reference, "cpu"), (kernels, device)):
        table = new_ngram_table(1, 1, 16, 64, torch.device(where))
        module.count_ngrams(table, 1, tokens.to(where), ints(0, device=where), ints(len(row), device=where))
        known = torch.tensor([[member] for member in crowd], device=where)
        each = NgramTable(*(value.repeat(len(crowd), *[1] * (value.ndim - 1)) for value in table))
        drafts = module.counted_drafts(each, 1, known, torch.zeros(len(crowd), dtype=torch.int32, device=where), 1)
        assert drafts[:, 0].tolist() == [500 + member for member in crowd]
        tables.append(table)
    assert same(*tables) and int(tables[0].contexts[0, 0, 0, 0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a graph needs a GPU")
def test_a_graph_counts_and_drafts_what_it_is_given():
    table, mine = (new_ngram_table(2, 2, 64, 256, torch.device(where)) for where in ("cuda", "cpu"))
    tokens, first, end = torch.zeros(2, 60, dtype=torch.int64), ints(0, 0), ints(0, 0)
    fillers = torch.zeros(2, 4, 3, dtype=torch.int64)
    given = [value.cuda() for value in (tokens, first, end, fillers)]

    def step() -> torch.Tensor:
        kernels.count_ngrams(table, 1, *given, 0.5)
        return kernels.counted_drafts(table, 1, given[0], given[2] - 1, 5)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafts = step()
    tokens = torch.randint(4, (2, 60), generator=torch.Generator().manual_seed(0))
    for turn in range(10):
        first, end = ints(turn * 4, turn * 3), ints(turn * 4 + 4, turn * 3 + 3)
        fillers = torch.randint(4, (2, 4, 3), generator=torch.Generator().manual_seed(turn))
        for place, value in zip(given, (tokens, first, end, fillers), strict=True):
            place.copy_(value)
        graph.replay()
        reference.count_ngrams(mine, 1, tokens, first, end, fillers, 0.5)
        assert same(table, mine)
        assert torch.equal(drafts.cpu(), reference.counted_drafts(mine, 1, tokens, end - 1, 5))


def test_no_sequences(device):
    table = new_ngram_table(0, 2, 20, 20, torch.device(device))
    tokens, none = torch.zeros(0, 5, dtype=torch.int64, device=device), ints(device=device)
    for module in (reference, kernels):
        module.count_ngrams(table, 1, tokens, none, none)
        assert module.counted_drafts(table, 1, tokens, none, 3).shape == (0, 3)


GOOD = new_ngram_table(2, 2, 20, 20, torch.device("cpu"))


@pytest.mark.parametrize(
    "change, text",
    [
        ({"tokens": torch.zeros(2, 9)}, "tokens must be int64"),
        ({"tokens": torch.zeros(9, 2, dtype=torch.int64).t()}, "with contiguous rows"),
        ({"first": torch.zeros(2, dtype=torch.int64)}, r"first must be int32 \[2\]"),
        ({"end": torch.zeros(3, dtype=torch.int32)}, r"end must be int32 \[2\]"),
        ({"fillers": torch.zeros(2, 3, dtype=torch.int64)}, r"fillers must be int64 \[2, m, k\]"),
        ({"fillers": torch.zeros(2, 3, 1)}, r"fillers must be int64 \[2, m, k\]"),
        ({"weight": -0.5}, "weight must be at least 0 and finite"),
        ({"weight": float("nan")}, "weight must be at least 0 and finite"),
        ({"shortest": 0}, "got 2 lengths from 0 on"),
        ({"shortest": 4}, "got 2 lengths from 4 on"),
        ({"table": GOOD._replace(counts=GOOD.counts.float())}, r"table.counts must be contiguous float64 \[2, 2, 64\]"),
        ({"table": GOOD._replace(best=GOOD.best[:1])}, r"table.best must be contiguous int32 \[2, 2, 64\]"),
        ({"table": GOOD._replace(grams=GOOD.grams[..., :24], counts=GOOD.counts[..., :24])}, "contiguous"),
        (
            {"table": NgramTable(*(value[:, :, :24].contiguous() for value in GOOD))},
            "the places of contexts must be a power of two",
        ),
    ],
)
def test_count_ngrams_refuses(change, text):
    arguments = {
        "table": GOOD,
        "shortest": 1,
        "tokens": torch.zeros(2, 9, dtype=torch.int64),
        "first": ints(0, 0),
        "end": ints(4, 4),
        **change,
    }
    for module in (reference, kernels):
        with pytest.raises(ValueError, match=f"count_ngrams: .*{text}"):
            module.count_ngrams(**arguments)
    assert not any(value.any() for value in GOOD)


def test_counted_drafts_refuses():
    tokens = torch.zeros(2, 9, dtype=torch.int64)
    for module in (reference, kernels):
        with pytest.raises(ValueError, match="counted_drafts: places must be at least 1"):
            module.counted_drafts(GOOD, 1, tokens, ints(0, 0), 0)
        with pytest.raises(ValueError, match=r"counted_drafts: lengths must be int32 \[2\]"):
            module.counted_drafts(GOOD, 1, tokens, torch.zeros(2), 3)
