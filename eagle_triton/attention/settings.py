"""How attention is launched: the settings of a shape, from what was measured."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from eagle_triton.runtime.overlap import triton_version

MERGE_REGISTERS = 64  # of 8 splits: two programs find room beside two of attention's on Hopper


class Settings(NamedTuple):
    """How one shape is launched: the keys are split into up to `splits` parts of at least `min_tiles` tiles, which are
    added up by a kernel of its own if there are as many `programs`, else by one program; that changes no bit.

    block_m rows, block_n keys per tile (block_t in tiles with new keys); tma: committed keys come through a tensor
    descriptor; pdl: 1 lets the merge launch early, 2 the attention kernel too; maxnreg caps the registers. streamed:
    trees are attended by streamed.py's kernel where it can, which always starts early, with tiles and registers of its
    own.
    """

    block_m: int
    block_n: int
    splits: int
    programs: int
    min_tiles: int
    num_warps: int
    num_stages: int
    block_t: int = 64
    tma: bool = False
    pdl: int = 0
    maxnreg: int = 0
    streamed: bool = False


def settings_for(
    rows: int,
    width: int,
    kv_heads: int,
    batch: int,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
) -> Settings:
    """The launch settings for `rows` = N * G query rows per key/value head. Of lengths they know nothing, and `splits`
    of the batch.

    `capability` is that of a CUDA device, None elsewhere. Measured on an H200 by `tools/tune_attention.py` (bf16, 32/8
    heads, d 128), both kernels of kernels.py together (streamed.py has its own), µs at 512, 2048 and 8192 keys. 60
    nodes of one sequence, 8 splits: 10.7, 15.6, 31; 4 splits: 10.6, 22, 39. Of eight sequences one program for all
    splits takes 21, 58, 197, one for each of four 29, 59, 187. One node of one sequence, 16 splits: 5.9, 9.9, 15; 8
    splits: 7.1, 13, 22. Of 64 sequences one program for all splits: 46, 134, 489, where reading alone takes 31, 126,
    502. Between, few rows of eight sequences, neither is good: 12.8, 27, 79 with 16 splits, 10.7, 24, 75 with 8. Of 60
    nodes of four sequences with 512 keys one program for all splits takes 13.2 on another card, one for each 16.6
    (streamed.py); more keys were not tried. Half of the splits up to 64 tiles: more are not worth their merge. A
    program that has no keys must do nothing at all: a batch has many. The number of a tile's page must be known a tile
    ahead: 37.7 instead of 31.4 at 8192 keys. Descriptors do not matter up to 2048 keys, and save 2 % at 8192. A tile
    with new keys takes two to three times as long as another whatever its height, so block_t 64 beats 32. Dependent
    launch (pdl 2) takes 0.3 µs off at 60 nodes, 0.6 at 10, if merges keep to MERGE_REGISTERS: else it costs 2.
    """
    hopper = capability is not None and capability[0] in (9, 10)
    num_stages = 3 if hopper else 2
    wide = width > 128
    if dtype == torch.float32:
        block_m, block_n, num_stages = (16 if rows <= 16 or wide else 32), (16 if wide else 32), 1
    elif rows <= 16:
        block_m, block_n = 16, 32 if wide else 64
    else:
        block_m, block_n = 64, 32 if wide else 64
    if capability is None:  # 64 KiB of shared memory on the CDNA 3 GPUs this is compiled for
        num_stages = 1
    few_rows = rows <= 64
    if rows > 1024:  # a chunk of a prompt fills the device with its row blocks
        splits = programs = 1
    else:
        for_a_split = max(kv_heads * triton.cdiv(rows, block_m), 1)  # of one sequence
        splits = _power_of_two(min(264 // for_a_split, 8 if capability is None else 16))
        programs = splits if for_a_split * batch < (128 if few_rows else 256) else 1
    return Settings(
        block_m,
        block_n,
        splits,
        programs,
        2 if few_rows else 4,
        4,  # the megakernel's: launch.DRAFT_WARPS
        num_stages,
        min(block_n, 64),
        pdl=2 if hopper else 0,
        tma=hopper and rows > 16 and dtype != torch.float32,
        streamed=capability == (9, 0) and dtype.itemsize == 2 and 64 <= width <= 128 and triton_version() >= (3, 6),
    )


def _power_of_two(count: int) -> int:
    """The largest that is no more, at least 1: few variants to compile."""
    return 1 << (max(count, 1).bit_length() - 1)


def merge_rows_of(splits: int, width: int) -> int:
    """Rows of a program of the merge, which is one warp: as many as keep 64 loads of a thread in flight. No sum crosses
    threads."""
    return max(1, 2048 // (triton.next_power_of_2(splits) * max(16, triton.next_power_of_2(width))))


def settings_for_pieces(use: Settings, rows: int, heads: int) -> Settings:
    """The same for pieces of prompts, `rows` query rows of each of `heads` heads, all pieces counted.

    One split where they fill the device, else eight, and sixteen for many keys. On an H200, 32 pieces of 64 tokens of
    32 heads of 128 (bf16): 136 µs for a prompt of 2048 with one split, 193 and the merge with four; behind 14336 rows
    1179 with descriptors, 1257 without. Tiles of 128 query rows on 8 warps take 10 to 20 % longer, 128 keys 10 to 60 %
    (an experiment that was not kept).
    """
    fills = heads * triton.cdiv(rows, use.block_m) >= 96
    if fills:
        return use._replace(splits=1, programs=1, pdl=0)
    return use._replace(splits=16, programs=16, min_tiles=1)
