"""Counts of tokens after other tokens, for drafts without a drafter.

A context of c tokens and the token after it are a (c + 1)-gram. Each context keeps the token with the largest count; of
equal counts the first token stays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

Context = tuple[int, ...]


class INgramStorage(ABC):
    """The interface of a storage for n-gram assisted decoding. B: sequences, T: tokens in each.

    n: tokens of the longest gram, at least 2. vocab_size: tokens of the vocabulary. seed, generator: to draw tokens for
    unknown contexts; a `generator` replaces the seed. Raises ValueError for a smaller n, or an empty vocabulary.
    """

    def __init__(self, n: int, vocab_size: int, *, seed: int = 0, generator: torch.Generator | None = None) -> None:
        if n < 2:
            raise ValueError(f"{type(self).__name__}: n must be at least 2, a token and one before it, got {n}")
        if vocab_size < 1:
            raise ValueError(f"{type(self).__name__}: vocab_size must be at least 1, got {vocab_size}")
        self.n, self.vocab_size, self.seed = n, vocab_size, seed
        self.generator = torch.Generator().manual_seed(seed) if generator is None else generator

    @abstractmethod
    def next_token(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The next tokens after ids [B, T]: int64 [B], and bool [B]: whether known; unknown ones are random.

        Raises ValueError for another shape, as all methods with ids do.
        """

    @abstractmethod
    def has_gram(self, ngram: Tensor | Sequence[int]) -> bool:
        """Whether the last tokens of ngram [T], at most n of them, are a stored gram."""

    @abstractmethod
    def update(self, ids: Tensor, next_tokens: Tensor, weight: float = 1) -> None:
        """Count each of next_tokens [B, m] after ids [B, T], `weight` times."""

    @abstractmethod
    def initialize(self, ids: Tensor) -> None:
        """Count every token of ids [B, T] after its context. Earlier counts stay."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all counts; a generator made from the seed starts again."""


class CountingStorage(INgramStorage):
    """Counts by context, for some context lengths, in dictionaries on the host."""

    def __init__(self, n: int, vocab_size: int, *, seed: int = 0, generator: torch.Generator | None = None) -> None:
        super().__init__(n, vocab_size, seed=seed, generator=generator)
        self._own_generator = generator is None
        self._counts: dict[Context, dict[int, float]] = {}
        self._best: dict[Context, int] = {}

    @property
    @abstractmethod
    def context_lengths(self) -> range:
        """The lengths of counted contexts, the shortest first."""

    @property
    def empty(self) -> bool:
        """Whether nothing has been counted."""
        return not self._counts

    def next_token(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The most counted token after the longest known context of ids [B, T], and whether there is one."""
        found = [self._known(row) for row in _rows("ids", ids)]
        tokens = [self._random() if token is None else token for token in found]
        known = [token is not None for token in found]
        return torch.tensor(tokens, device=ids.device), torch.tensor(known, device=ids.device)

    def has_gram(self, ngram: Tensor | Sequence[int]) -> bool:
        tokens = [int(token) for token in (ngram.reshape(-1) if isinstance(ngram, Tensor) else ngram)]
        length = min(self.n, len(tokens)) - 1
        if length not in self.context_lengths:
            return False
        return tokens[-1] in self._counts.get(tuple(tokens[-length - 1 : -1]), {})

    def update(self, ids: Tensor, next_tokens: Tensor, weight: float = 1) -> None:
        before, after = _rows("ids", ids), _rows("next_tokens", next_tokens)
        if len(before) != len(after):
            raise ValueError(f"update: next_tokens of {len(before)} sequences expected, got {len(after)}")
        for row, tokens in zip(before, after, strict=True):
            for token in tokens:
                self._count(row, len(row), token, weight)

    def initialize(self, ids: Tensor) -> None:
        for row in _rows("ids", ids):
            for place, token in enumerate(row):
                self._count(row, place, token, 1)

    def reset(self) -> None:
        self._counts.clear()
        self._best.clear()
        if self._own_generator:
            self.generator.manual_seed(self.seed)

    def _count(self, row: list[int], end: int, token: int, weight: float) -> None:
        """Count a token after row[:end]."""
        for length in self.context_lengths:
            if length > end:
                break
            context = tuple(row[end - length : end])
            counts = self._counts.setdefault(context, {})
            counts[token] = counts.get(token, 0) + weight
            best = self._best.setdefault(context, token)
            if counts[token] > counts[best]:
                self._best[context] = token

    def _known(self, row: list[int]) -> int | None:
        for length in reversed(self.context_lengths):
            if length <= len(row) and (token := self._best.get(tuple(row[-length:]))) is not None:
                return token
        return None

    def _random(self) -> int:
        return int(torch.randint(self.vocab_size, (1,), generator=self.generator, device=self.generator.device))


class NGramStorage(CountingStorage):
    """Grams of 2 to n tokens; the longest known context decides."""

    @property
    def context_lengths(self) -> range:
        """1 to n - 1."""
        return range(1, self.n)


class OneLevelNGramStorage(CountingStorage):
    """Grams of n tokens alone."""

    @property
    def context_lengths(self) -> range:
        """n - 1."""
        return range(self.n - 1, self.n)


def _rows(name: str, ids: Tensor) -> list[list[int]]:
    if ids.dim() != 2:
        raise ValueError(f"{name} must be [B, T], got {list(ids.shape)}")
    return ids.tolist()
