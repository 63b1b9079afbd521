"""Caches whose rows lie in pages, from dense ones."""

import torch
from torch import Tensor


def in_pages(cache: Tensor, page_rows: int, spare: int = 3) -> tuple[Tensor, Tensor]:
    """A cache [..., B, Hkv, T, d] as [..., P, Hkv, R, d], its pages in any order among `spare` that are NaN, and the
    table [B, T / R] int32."""
    *planes, batch, heads, capacity, width = cache.shape
    count = capacity // page_rows
    used = torch.randperm(batch * count + spare, device="cpu")[: batch * count].to(cache.device)
    pages = cache.new_full((*planes, batch * count + spare, heads, page_rows, width), float("nan"))
    split = cache.unflatten(-2, (count, page_rows)).movedim(-3, -4)  # [..., B, T / R, Hkv, R, d]
    pages[..., used, :, :, :] = split.flatten(len(planes), len(planes) + 1)
    return pages, used.view(batch, count).int()


def out_of_pages(pages: Tensor, table: Tensor) -> Tensor:
    """The dense cache again."""
    taken = pages[..., table.long(), :, :, :]  # [..., B, W, Hkv, R, d]
    return taken.movedim(-4, -3).flatten(-3, -2)
