"""Mixtures of experts: the kernels against their references, both against transformers' blocks, and what is read."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle_triton import optimize_with_triton
from eagle_triton.engine.model.module_kinds import is_mixture
from eagle_triton.engine.model.modules import Experts, feed_forward
from eagle_triton.engine.operations import make_operations
from eagle_triton.families.reading.experts import read_experts
from eagle_triton.operands.experts import MAX_ROWS, Routes, Routing
from eagle_triton.ops import experts
from eagle_triton.reference import experts as reference
from eagle_triton.runtime.fallback import gluon_module
from eagle_triton.runtime.float8_expert_weight import Float8ExpertWeight
from eagle_triton.runtime.float8_weight import Float8Weight
from eagle_triton.runtime.four_bit_expert_weight import FourBitExpertWeight
from eagle_triton.runtime.four_bit_weight import FourBitWeight, Packing
from eagle_triton.runtime.four_bit_weight import packed as as_words
from eagle_triton.runtime.mxfp4_weight import Mxfp4Weight
from eagle_triton.runtime.split_sums import SplitSums, total_of
from tests.rounding import CUDA
from tests.test_layers import DTYPES, assert_close
from tests.tiny_families import skipped_if_unknown, tiny_family
from tests.tiny_hybrids import KINDS, tiny_hybrid

FAMILIES = (
    *("qwen3_moe", "qwen2_moe", "mixtral", "granitemoe", "glm4_moe", "gpt_oss"),
    *("afmoe", "laguna", "minimax_m2", "hy_v3", "granitemoehybrid", "nemotron_h with experts"),
    *("ernie4_5_moe", "deepseek_v2", "hunyuan_v1_moe", "flint", "lara_mini"),
)
IN_FP32 = {  # what transformers keeps so
    "glm4_moe": ("gate.e_score_correction_bias",),
    "afmoe": ("expert_bias",),
    "hy_v3": ("e_score_correction_bias", "gate.weight"),
    "nemotron_h with experts": ("gate.e_score_correction_bias", "gate.weight"),
    "ernie4_5_moe": ("gate.weight", "gate.moe_statics.e_score_correction_bias"),
    "deepseek_v2": ("gate.weight",),
    "hunyuan_v1_moe": ("gate.wg.weight",),
    "flint": ("gate.weight",),
}
HYBRIDS = [kind for kind in ("qwen3_next", "qwen3_5_moe") if kind in KINDS]

ROUTINGS = {
    "softmax": Routing(3),
    "softmax as it is": Routing(2, renormalised=False, weights_in_fp32=True, scale=2.5),
    "softmax of chosen": Routing(3, "softmax_of_chosen"),
    "softmax in fp32": Routing(3, rounded_logits=False),
    "softmax corrected": Routing(3, rounded_logits=False, scale=0.7),
    "sigmoid": Routing(3, "sigmoid", renormalised=False, weights_in_fp32=True, scale=1.5, rounded_logits=False),
    "groups": Routing(3, "sigmoid", groups=3, chosen_groups=2, scale=0.7, rounded_logits=False),
    "rounded": Routing(3, "sigmoid", weights_in_fp32=True, scale=1.5),
    "rounded scores": Routing(3, "sigmoid", rounded_scores=True, eps=1e-6),
}


def router(
    device: str,
    dtype: torch.dtype,
    routing: Routing,
    rows: int,
    count: int = 12,
    width: int = 40,
    corrected: bool = False,
) -> tuple:
    """The operands of `route`; sigmoid always has a correction, the softmax of chosen ones a bias."""
    source = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, width, generator=source), torch.randn(count, width, generator=source)
    bias, correction = torch.randn(2, count, generator=source)
    return (
        x.to(device, dtype),
        weight.to(device, dtype),
        bias.to(device, dtype) if routing.score == "softmax_of_chosen" else None,
        correction.to(device) if corrected or routing.score == "sigmoid" else None,
        routing,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5, 64])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_route(device, kind, rows, dtype):
    operands = router(device, dtype, ROUTINGS[kind], rows, corrected=kind == "softmax corrected")
    got, same = experts.route(*operands), reference.route(*operands)
    for one, other in zip(got, same, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
    if rows:
        assert torch.equal(got.experts, same.experts)
        assert torch.equal(got.hit, same.hit) and torch.equal(got.rows, same.rows)
        x, weight, bias, correction, routing = operands
        wide = x.float(), weight.float(), None if bias is None else bias.float(), correction, routing
        exact = reference.route(*wide)
        agreed = (exact.experts == same.experts).all(1)  # two logits may be one in 16 bits
        assert agreed.any()
        assert_close(got.weights[agreed], same.weights[agreed], exact.weights[agreed].float())


@pytest.mark.parametrize("correction", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["rounded", "groups", "softmax corrected"])
def test_a_correction_has_a_dtype_of_its_own(device, kind, correction):
    """It is added to scores in fp32, whatever the rows are: a rounded one chooses as its fp32 numbers do."""
    x, weight, bias, of_scores, routing = router(device, DTYPES[-1], ROUTINGS[kind], 64, corrected=True)
    of_scores = (9 * of_scores).to(correction)
    for module in (experts, reference):
        got = module.route(x, weight, bias, of_scores, routing)
        wide = module.route(x, weight, bias, of_scores.float(), routing)
        assert all(map(torch.equal, got, wide))
        assert not torch.equal(got.experts, module.route(x, weight, bias, None, routing).experts)
    assert torch.equal(got.experts, experts.route(x, weight, bias, of_scores, routing).experts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounded_logits_are_heard(device, dtype):
    """They are the scores of a product in 16 bits, as some models compute them; others' are of one in fp32."""
    x, weight, _, correction, routing = router(device, dtype, ROUTINGS["rounded"], 64)
    exact = replace(routing, rounded_logits=False)
    for module in (experts, reference) if dtype in DTYPES else (reference,):
        got, other = (module.route(x, weight, None, correction, way) for way in (routing, exact))
        for routes, logits in ((got, (x.float() @ weight.float().T).to(dtype)), (other, x.float() @ weight.float().T)):
            scores = logits.float().sigmoid()
            chosen = (scores + correction).topk(3).indices
            weights = scores.gather(1, chosen)
            weights = 1.5 * weights / weights.sum(1, keepdim=True)
            alike = (routes.experts.sort().values == chosen.sort().values).all(1)  # of nearly equal scores any is right
            assert alike.float().mean() > 0.95
            near = (routes.weights.sort().values - weights.sort().values).abs()[alike] < 1e-6
            assert near.float().mean() > 0.95  # the order of a sum may change a logit's last bit
        assert (got.weights != other.weights).float().mean() > 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [3, 7])
def test_route_over_several_tiles(device, rows, dtype):
    """300 experts, three splits of K, and operands whose elements do not lie side by side. Logits are whole numbers, so
    that many are equal and none is rounded."""
    source = torch.Generator().manual_seed(rows)
    x, weight = (torch.randint(-2, 3, (n, 520), generator=source).to(device, dtype) for n in (rows, 300))
    bias = torch.randint(-9, 10, (300, 2), generator=source).to(device, dtype)[:, 0]
    operands = x, weight.mT.contiguous().mT, bias, None, Routing(5, "softmax_of_chosen")
    got, same = experts.route(*operands), reference.route(*operands)
    for part in ("experts", "hit", "rows"):
        assert torch.equal(getattr(got, part), getattr(same, part))
    exact = reference.route(x.float(), weight.float(), bias.float(), *operands[3:])
    assert_close(got.weights, same.weights, exact.weights)


def test_a_shared_word_names_the_rows_of_each_expert(device):
    """One expert that all 64 rows choose, several that none does; the word's sign is a row too."""
    x = torch.ones(64, 16, device=device)
    x[:, 1] = torch.linspace(-4, 4, 64)
    weight = torch.zeros(8, 16, device=device)
    weight[5, 0], weight[2, 1], weight[6, 1] = 9.0, 1.0, -1.0
    for module in (experts, reference):
        routes = module.route(x, weight, None, None, Routing(2))
        assert (routes.experts[:, 0] == 5).all()
        assert routes.hit.tolist() == [2, 5, 6, *[0] * 5]
        assert routes.rows.tolist() == [-(1 << 32), -1, (1 << 32) - 1, *[0] * 5]


@pytest.mark.parametrize("routing", [Routing(3), Routing(3, "sigmoid", groups=2, chosen_groups=1)], ids=str)
def test_equal_scores_go_by_index(device, routing):
    x, weight = torch.randn(5, 16, device=device), torch.zeros(8, 16, device=device)
    weight[3] = weight[7] = torch.randn(16)
    for module in (experts, reference):
        alike = module.route(x, torch.zeros_like(weight), None, None, routing)
        assert alike.experts.tolist() == [[0, 1, 2]] * 5 and alike.weights.unique().numel() == 1
        if routing.score == "softmax":
            chosen = module.route(x, weight, None, None, routing).experts
            up = (x @ weight[3]) > 0
            assert torch.equal(
                chosen, torch.where(up[:, None], chosen.new_tensor([3, 7, 0]), chosen.new_tensor([0, 1, 2]))
            )


def test_a_row_without_numbers_chooses_experts_of_its_own(device):
    """What padding holds may be anything: it hits experts that there are, and other rows are as they were."""
    operands = router(device, torch.float32, ROUTINGS["groups"], 5)
    before = experts.route(*operands)
    operands[0][2] = float("nan")
    after = experts.route(*operands)
    assert after.experts[2].tolist() == [0, 1, 2] and after.weights[2].isnan().all()
    others = torch.tensor([0, 1, 3, 4], device=device)
    assert torch.equal(after.experts[others], before.experts[others])
    assert torch.equal(after.weights[others], before.weights[others])


ON_GPU = pytest.mark.skipif(not CUDA, reason="slow to interpret")
LAYOUTS = {
    "halves": dict(),
    "interleaved": dict(interleaved=True, clamp=(0.8, 1.7), transposed=True, biased=True),
    "without a gate": dict(gated=False, biased=True),
}


def block(device: str, dtype: torch.dtype, rows: int, *, transposed=False, biased=False, width=40, inner=24, **kind):
    """The operands of both products, 12 experts of which a row takes 3, weights by their own layout, and options."""
    routes = reference.route(*router(device, dtype, ROUTINGS["softmax"], rows, width=width))
    source = torch.Generator().manual_seed(3)

    def weight(*shape: int) -> Tensor:
        made = (torch.randn(shape, generator=source) * shape[2] ** -0.5).to(device, dtype)
        return made.mT.contiguous().mT if transposed else made

    def bias(size: int) -> Tensor | None:
        return torch.randn(12, size, generator=source).to(device, dtype) if biased else None

    x = torch.randn(rows, width, generator=source).to(device, dtype)
    columns = inner if not kind.get("gated", True) else 2 * inner
    gate_up, down = weight(12, columns, width), weight(12, width, inner)
    return (x, gate_up, bias(columns), routes), (down, bias(width), routes), kind


def in_fp32(operands: tuple) -> tuple:
    return tuple(
        part._replace(weights=part.weights.float())
        if isinstance(part, Routes)
        else None
        if part is None
        else part.float()
        for part in operands
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, inner", [(1, 24), (5, 40), (64, 72)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products(device, layout, rows, inner, dtype):
    first, second, kind = block(device, dtype, rows, inner=inner, **LAYOUTS[layout])
    got, same = experts.experts_swiglu(*first, **kind), reference.experts_swiglu(*first, **kind)
    assert_close(got, same, reference.experts_swiglu(*in_fp32(first), **kind))
    parts, same_parts = experts.experts_down(same, *second), reference.experts_down(same, *second)
    assert parts.dtype == dtype and parts.sums.shape == (3, rows, 40)
    exact = reference.experts_down(same.float(), *in_fp32(second))
    assert_close(parts.sums, same_parts.sums, exact.sums)
    assert_close(parts.total(), same_parts.total(), exact.total())


def check_products(first: tuple, second: tuple, kind: dict, gate_up: Any, down: Any, exactly: bool = True) -> None:
    """Both products with these weights in the place of the operands': the kernels against the references, and these
    against plain weights. exactly: of plain weights in the rows' dtype they have the same bits."""
    wide = first[0].dtype if exactly else torch.float32
    narrow, whole = (
        ((first[0], up, *first[2:]), (out, *second[1:]))
        for up, out in ((gate_up, down), (gate_up.dequantised(wide), down.dequantised(wide)))
    )
    got, same = experts.experts_swiglu(*narrow[0], **kind), reference.experts_swiglu(*narrow[0], **kind)
    assert_close(got, same, reference.experts_swiglu(*in_fp32(whole[0]), **kind))
    parts, same_parts = experts.experts_down(same, *narrow[1]), reference.experts_down(same, *narrow[1])
    assert_close(parts.sums, same_parts.sums, reference.experts_down(same.float(), *in_fp32(whole[1])).sums)
    if exactly:
        assert torch.equal(same, reference.experts_swiglu(*whole[0], **kind))
        assert torch.equal(same_parts.sums, reference.experts_down(same, *whole[1]).sums)


def packed(device: str, *shape: int, scales: tuple[int, int] = (118, 124)) -> Mxfp4Weight:
    """Random weights in MXFP4, whose scales are at least the first and below the second."""
    experts, rows, depth = shape
    source = torch.Generator().manual_seed(depth)
    blocks = torch.randint(0, 256, (experts, rows, depth // 32, 16), generator=source, dtype=torch.uint8)
    found = torch.randint(*scales, blocks.shape[:3], generator=source, dtype=torch.uint8)
    return Mxfp4Weight(blocks.to(device), found.to(device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rows, width, inner, layout",
    [
        (1, 96, 64, "interleaved"),
        (7, 96, 96, "halves"),
        pytest.param(61, 352, 416, "interleaved", marks=ON_GPU),
        pytest.param(9, 96, 1056, "halves", marks=ON_GPU),  # several slots of Hopper's ring
    ],
)
def test_products_with_mxfp4(device, rows, width, inner, layout, dtype):
    first, second, kind = block(device, dtype, rows, width=width, inner=inner, **LAYOUTS[layout])
    check_products(first, second, kind, packed(device, 12, 2 * inner, width), packed(device, 12, width, inner))


def test_every_number_and_scale_of_mxfp4(device):
    """By rows that are units. With the scales that are left out, 6 is not finite."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    blocks = (torch.arange(16) | (torch.arange(15, -1, -1) << 4)).to(torch.uint8).expand(1, 253, 1, 16)
    scales = torch.arange(253, dtype=torch.uint8, device=device)[None, :, None]
    weight = Mxfp4Weight(blocks.contiguous().to(device), scales)
    expected = torch.stack([numbers, numbers.flip(0)], 1).flatten() * 2.0 ** (torch.arange(253.0)[:, None] - 127)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(weight.dequantised(dtype)[0].cpu().float(), expected)
    x = torch.eye(32, device=device)
    routes = reference.route(torch.ones(32, 8, device=device), torch.ones(1, 8, device=device), None, None, Routing(1))
    parts = experts.experts_down(x[:, None].contiguous(), weight, None, routes)
    assert torch.equal(parts.sums[0].cpu().T, expected)
    if parts.sums.is_cuda:  # Hopper's kernels see weights that are 2**32 times smaller
        found = experts.experts_down(x.bfloat16()[:, None].contiguous(), weight, None, routes).sums[0].cpu().T
        assert torch.equal(found[40:161], expected[40:161])
        assert torch.cuda.get_device_capability() != (9, 0) or found[161:].isnan().any(1).all()


def test_which_products_in_four_bits_hoppers_kernels_take(monkeypatch):
    hopper = gluon_module("eagle_triton.ops.experts.hopper_experts")
    if hopper is None:
        pytest.skip("needs Triton 3.6")
    monkeypatch.setattr(hopper, "compute_capability", lambda device: (9, 0))
    x, weight = torch.zeros(4, 96, dtype=torch.bfloat16), packed("cpu", 2, 6, 96)
    shifted = torch.zeros(2 * 6 * 48 + 8, dtype=torch.uint8)[8:].view(2, 6, 3, 16)
    assert hopper.takes(x, weight)
    assert not hopper.takes(x.half(), weight)
    assert not hopper.takes(x.flatten()[4:100].view(1, 96), weight)
    assert not hopper.takes(x, Mxfp4Weight(shifted, weight.scales))
    assert not hopper.takes(x, Mxfp4Weight(weight.blocks[:, :4], weight.scales[:, :4]))
    integers = in_four_bits("cpu", 2, 6, 96, group=32, zeros=True, dtype=torch.bfloat16)
    assert hopper.takes(x, integers)
    assert not hopper.takes(x, replace(integers, scales=integers.scales.half()))
    assert not hopper.takes(x, replace(integers, scales=integers.scales.mT.contiguous().mT))
    monkeypatch.setattr(hopper, "compute_capability", lambda device: (10, 0))
    assert not hopper.takes(x, weight) and not hopper.takes(x, integers)


@pytest.mark.parametrize("height", [32, 64])
@pytest.mark.parametrize("kind", ["interleaved", "halves", "down"])
def test_hoppers_kernels_know_whose_weights_a_thread_has(kind, height):
    """The order of axes in which they take a part apart, against the rows of weights that they give its sums."""
    hopper = gluon_module("eagle_triton.ops.experts.hopper_tiles")
    if hopper is None:
        pytest.skip("needs Triton 3.6")
    shape, tiles = hopper.Tile(kind, height, 8, 32, 4, False), height // 32
    bits, order, of_rows = hopper.part_axes(kind, height, 4)
    words = torch.arange(height * 32).view(*bits).permute(order).reshape(of_rows).view(2, 2, 8, 4, 4, tiles, 2)
    word = torch.arange(32).view(2, 1, 1, 4, 4)
    half, row = torch.arange(2).view(1, 2, 1, 1, 1), torch.arange(8).view(1, 1, 8, 1, 1)
    rows = []
    for tile, second in itertools.product(range(tiles), range(2)):
        number = hopper.number_in_part.fn(half, row, tile, second, shape)
        assert torch.equal(words[..., tile, second], (32 * number + word).expand(2, 2, 8, 4, 4))
        rows.append(hopper.row_of.fn(number, 1000, 10000, shape).flatten())
    gates, ups = torch.cat(rows[::2]), torch.cat(rows[1::2])
    if kind == "interleaved":
        assert torch.equal(ups, gates + 1) and sorted(gates.tolist()) == [*range(2000, 2000 + height, 2)]
    elif kind == "halves":
        assert torch.equal(ups, gates + 5000) and sorted(gates.tolist()) == [*range(1000, 1000 + height // 2)]
    else:
        assert sorted(torch.cat(rows).tolist()) == [*range(1000, 1000 + height)]


def test_mxfp4_is_what_transformers_makes_of_it():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    weight = packed("cpu", 2, 6, 64)
    for dtype in (torch.bfloat16, torch.float32):
        theirs = mxfp4.convert_moe_packed_tensors(weight.blocks, weight.scales, dtype=dtype)
        assert torch.equal(theirs.mT, weight.dequantised(dtype))


def in_four_bits(device: str, *shape: int, group: int, zeros: bool, dtype: torch.dtype) -> FourBitExpertWeight:
    """Random weights in four bits."""
    count, rows, depth = shape
    source = torch.Generator().manual_seed(depth)

    def words(*sizes: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, sizes, generator=source, dtype=torch.int64).to(device, torch.int32)

    scales = (torch.rand(count, rows, depth // group, generator=source) * 0.1 / depth**0.5).to(device, dtype)
    packed = words(count, rows, depth // 8)
    return FourBitExpertWeight(packed, scales, words(count, -(-rows // 8), depth // group) if zeros else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rows, width, inner, group, zeros, kind",
    [
        (1, 64, 64, 32, True, {}),
        (7, 96, 96, 96, False, {}),
        (16, 320, 64, 64, True, LAYOUTS["interleaved"]),
        (64, 256, 128, 128, False, {}),
        pytest.param(9, 1280, 1536, 256, True, {}, marks=ON_GPU),
        pytest.param(1, 2048, 1088, 64, False, LAYOUTS["interleaved"], marks=ON_GPU),
    ],
    ids=str,
)
def test_products_with_four_bits(device, rows, width, inner, group, zeros, kind, dtype):
    first, second, kind = block(device, dtype, rows, width=width, inner=inner, **kind)
    options = dict(zeros=zeros, dtype=dtype)
    gate_up = in_four_bits(device, 12, 2 * inner, width, group=group, **options)
    down = in_four_bits(device, 12, width, inner, group=min(group, inner), **options)
    check_products(first, second, kind, gate_up, down)


def test_a_weight_in_four_bits_is_a_stack_of_single_ones():
    some = torch.tensor([2, 0])
    for zeros in (False, True):
        stack = in_four_bits("cpu", 3, 16, 192, group=64, zeros=zeros, dtype=torch.bfloat16)
        for dtype in (torch.float32, torch.bfloat16):
            parts = zip(*stack.tensors, strict=True)
            single = [FourBitWeight(words, Packing.ROWS, scale, 64, *zero) for words, scale, *zero in parts]
            alone = torch.stack([weight.dequantised(dtype) for weight in single])
            assert torch.equal(stack.dequantised(dtype), alone)
            assert torch.equal(stack.dequantised(dtype, some), alone[some])


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
def test_every_number_and_zero_of_four_bits(device, zeros):
    """By rows that are units, with a scale that does not keep products exact: they are rounded once."""
    numbers, rows = torch.arange(64) % 16, torch.arange(16)
    words = as_words(numbers.expand(1, 16, 64))
    stored = as_words(rows.view(1, 1, 16)).mT.contiguous() if zeros else None
    expected = numbers - (rows[:, None] if zeros else 8)
    for dtype in (torch.float32, *DTYPES):
        scales = torch.full((1, 16, 1), 1.1, dtype=dtype)
        weight = FourBitExpertWeight(*(None if part is None else part.to(device) for part in (words, scales, stored)))
        exact = (expected * scales[0].float()).to(dtype).float()
        assert torch.equal(weight.dequantised(dtype)[0].cpu().float(), exact)
        x = torch.eye(64, device=device, dtype=dtype)
        routes = reference.route(x.new_ones(64, 8), x.new_ones(1, 8), None, None, Routing(1))
        parts = experts.experts_down(x[:, None].contiguous(), weight, None, routes)
        assert torch.equal(parts.sums[0].cpu().T, exact)


def shifted(tensor: Tensor) -> Tensor:
    """The same bytes at an odd address."""
    room = torch.empty(tensor.numel() + 1, dtype=torch.uint8, device=tensor.device)[1:].view(tensor.shape)
    return room.copy_(tensor.view(torch.uint8)).view(tensor.dtype)


def in_float8(device: str, *shape: int) -> Float8ExpertWeight:
    """Random weights in FP8, zeros and the least and largest numbers among them; scales that differ by block."""
    source = torch.Generator().manual_seed(shape[2])
    values = torch.randint(0, 256, shape, generator=source, dtype=torch.uint8)
    values[values & 0x7F == 0x7F] = 0x7E  # no NaN
    count, *blocks = shape[0], -(-shape[1] // 128), -(-shape[2] // 128)
    scales = torch.rand(count, *blocks, generator=source) * 0.01 / shape[2] ** 0.5
    return Float8ExpertWeight(values.to(device).view(torch.float8_e4m3fn), scales.to(device))


@pytest.mark.parametrize(
    ("rows", "inner", "kind", "dtype"),
    [
        *((1, 128, {}, dtype) for dtype in DTYPES),
        (7, 96, {}, DTYPES[0]),
        *((64, 192, LAYOUTS["interleaved"], dtype) for dtype in DTYPES if CUDA or dtype == DTYPES[-1]),
    ],
    ids=str,
)
def test_products_with_float8(device, rows, inner, kind, dtype):
    first, second, kind = block(device, dtype, rows, width=208, inner=inner, **kind)
    gate_up, down = in_float8(device, 12, 2 * inner, 208), in_float8(device, 12, 208, inner)
    check_products(first, second, kind, gate_up, down, exactly=False)


def test_a_weight_in_float8_is_a_stack_of_single_ones():
    """By their dequantisation, rounded once; in blocks that are filled in part."""
    stack, some = in_float8("cpu", 3, 200, 304), torch.tensor([2, 0])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        single = [Float8Weight(*parts).dequantised(dtype) for parts in zip(*stack.tensors, strict=True)]
        assert torch.equal(stack.dequantised(dtype), torch.stack(single))
        assert torch.equal(stack.dequantised(dtype, some), torch.stack(single)[some])


def test_every_number_of_float8(device):
    """By rows that are units, with a scale that no format of 16 bits holds."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers[numbers & 0x7F == 0x7F] = 0
    values = numbers.view(torch.float8_e4m3fn)[None, :, None].expand(1, 256, 128).contiguous()
    scales = torch.tensor([[[1.1], [1 / 3]]])
    expected = values[0, :, :2].float() * scales[0].repeat_interleave(128, 0)
    weight = Float8ExpertWeight(values.to(device), scales.to(device))
    routes = reference.route(torch.ones(2, 8, device=device), torch.ones(1, 8, device=device), None, None, Routing(1))
    for dtype in (torch.float32, *DTYPES):
        x = torch.eye(2, 128, device=device, dtype=dtype)[:, None].contiguous()
        routed = routes._replace(weights=routes.weights.to(dtype))
        for module in (experts, reference):
            assert torch.equal(module.experts_down(x, weight, None, routed).sums[0].cpu().T, expected.to(dtype).float())


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(("plain", dtype) for dtype in DTYPES if CUDA or dtype == DTYPES[-1]),
        *((kind, DTYPES[-1]) for kind in ("FP8", "four bits", "MXFP4")),
    ],
)
def test_the_bits_of_a_row_are_its_own(device, dtype, kind):
    """Alone, among five, and among 64 rows, of which 40 choose other experts and 24 the same."""
    routing, width = ROUTINGS["softmax"], 1056 if CUDA else 544
    x, weight, *others = router(device, dtype, routing, 64, width=width)
    x[40:] = x[7]
    (_, gate_up, _, _), (down, _, _), _ = block(device, dtype, 1, width=width, inner=32)
    narrow = partial(in_four_bits, group=32, zeros=True, dtype=dtype)
    make = {"FP8": in_float8, "MXFP4": packed, "four bits": narrow}.get(kind)
    if make is not None:
        gate_up, down = (make(device, *part.shape) for part in (gate_up, down))

    def computed(rows: Tensor) -> tuple[Tensor, ...]:
        routes = experts.route(rows, weight, *others)
        inner = experts.experts_swiglu(rows, gate_up, None, routes)
        return routes.experts, routes.weights, inner, experts.experts_down(inner, down, None, routes).total()

    whole = computed(x)
    for places in ([7], [0, 7, 21, 39, 63]):
        for part, all_parts in zip(computed(x[places]), whole, strict=True):
            assert torch.equal(part, all_parts[places])
    for all_parts in whole:
        assert torch.equal(all_parts[40:], all_parts[7:8].expand_as(all_parts[40:]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [40, 1100])
def test_add_shared_expert(device, size, dtype):
    x, shared, gate = (torch.randn(5, size).to(device, dtype) for _ in range(3))
    routed, gate = SplitSums(torch.randn(3, 5, size, device=device), dtype), gate[:1] * size**-0.5
    got, same = (module.add_shared_expert(routed, shared, x, gate) for module in (experts, reference))
    wide = SplitSums(routed.sums, torch.float32)
    assert_close(got, same, reference.add_shared_expert(wide, shared.float(), x.float(), gate.float()))
    split = SplitSums(torch.stack([shared.float(), torch.zeros_like(routed.sums[0])]), dtype)
    assert torch.equal(experts.add_shared_expert(routed.total(), split, x, gate), got)


def test_what_does_not_fit_is_refused(device):
    x, weight, *rest = router(device, torch.float32, ROUTINGS["softmax"], 5)
    (_, gate_up, _, routes), (down, _, _), _ = block(device, torch.float32, 5)
    inner, many = torch.zeros(5, 3, 24, device=device), torch.zeros(MAX_ROWS + 1, 40, device=device)
    for module in (experts, reference):
        with pytest.raises(ValueError, match="route: at most 64 rows, got 65"):
            module.route(many, weight, *rest)
        with pytest.raises(ValueError, match=r"route: weight must be float32 \[E, 40\]"):
            module.route(x, weight[:, 1:], *rest)
        with pytest.raises(ValueError, match="routing.chosen must be at most the 12 experts, got 13"):
            module.route(x, weight, None, None, Routing(13))
        with pytest.raises(ValueError, match="routing.groups must divide the 12 experts"):
            module.route(x, weight, None, None, Routing(3, "sigmoid", groups=12, chosen_groups=1))
        with pytest.raises(ValueError, match='correction needs routing.score "sigmoid"'):
            module.route(x, weight, None, torch.zeros(12, device=device), Routing(3, "softmax_of_chosen"))
        for wrong in (torch.zeros(11, device=device), torch.zeros(12, dtype=torch.int32, device=device)):
            with pytest.raises(ValueError, match=r"route: correction must be floats \[12\]"):
                module.route(x, weight, None, wrong, Routing(3, "sigmoid"))
        with pytest.raises(ValueError, match="gate_up must have an even number of rows, got 47"):
            module.experts_swiglu(x, gate_up[:, 1:], None, routes)
        with pytest.raises(ValueError, match=r"routes.experts must be contiguous int32 \[4, k\]"):
            module.experts_swiglu(x[:4], gate_up, None, routes)
        with pytest.raises(ValueError, match=r"experts_down: down must be float32 \[E, H, 24\]"):
            module.experts_down(inner, down[:, :, 1:], None, routes)
        with pytest.raises(ValueError, match=r"experts_down: down must be \[E, H, 24\]"):
            module.experts_down(inner, packed(device, 12, 40, 32), None, routes)
        with pytest.raises(ValueError, match=r"add_shared_expert: gate must be contiguous float32 \[1, 40\]"):
            module.add_shared_expert(x, x, x, x[:2])
    blocks, scales = packed(device, 2, 6, 64).tensors
    for one, other, message in (
        (blocks.short(), scales, r"blocks must be uint8 \[E, N, K / 32, 16\], got torch.int16"),
        (blocks[..., :8], scales, r"blocks must be uint8 .* \[2, 6, 2, 8\]"),
        (blocks, scales[:, :5], r"scales must be uint8 \[2, 6, 2\], got torch.uint8 \[2, 5, 2\]"),
        (blocks.mT.contiguous().mT, scales, "rows must be contiguous"),
        (shifted(blocks), scales, "rows of blocks must be aligned to 4 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            Mxfp4Weight(one, other)
    values, scales = in_float8(device, 2, 200, 304).tensors
    for one, other, message in (
        (
            values.view(torch.uint8),
            scales,
            r"values must be float8_e4m3fn \[E, N, K\], K a multiple of 16, got torch.uint8",
        ),
        (values[..., :300], scales, r"values must be .* \[2, 200, 300\]"),
        (values[:, :128], scales, "values must be contiguous"),
        (shifted(values), scales, "values must be contiguous and aligned to 4 bytes"),
        (values, scales[:, :1], r"scales must be float32 or bfloat16 \[2, 2, 3\], got torch.float32 \[2, 1, 3\]"),
        (values, scales.half(), r"scales must be float32 or bfloat16 .* got torch.float16"),
        (values, scales.to("meta"), "scales must be on the device of the values"),
    ):
        with pytest.raises(ValueError, match=message):
            Float8ExpertWeight(one, other)
    words, scales, zeros = in_four_bits(device, 2, 12, 192, group=64, zeros=True, dtype=torch.float16).tensors
    for parts, message in (
        ((words.long(), scales), r"packed must be int32 \[E, N, K / 8\], K a multiple of 32, got torch.int64"),
        ((words[..., :3], scales), r"packed must be int32 .* \[2, 12, 3\]"),
        ((words[:, ::2], scales[:, ::2]), "packed must be contiguous"),
        ((words, scales[:, 1:]), r"scales must be a float \[2, 12, K / group\], got torch.float16 \[2, 11, 3\]"),
        ((words, scales.int()), "scales must be a float .* got torch.int32"),
        ((words, scales[..., :2]), "a group must be 32 or 64 columns, a multiple of 128, or all 192, got 2 groups"),
        ((words, scales, zeros[:, :1]), r"zeros must be int32 \[2, 2, 3\], got torch.int32 \[2, 1, 3\]"),
        ((words, scales.to("meta")), "all tensors must be on the device of packed"),
    ):
        with pytest.raises(ValueError, match=message):
            FourBitExpertWeight(*parts)
    for module in (experts, reference):
        with pytest.raises(ValueError, match=r"experts_down: down.scales must be float32 \[12, 40, G\]"):
            narrow = in_four_bits(device, 12, 40, 32, group=32, zeros=False, dtype=torch.float16)
            module.experts_down(torch.zeros(5, 3, 32, device=device), narrow, None, routes)
    unsummed = dict(score="softmax_of_chosen", renormalised=False)
    for wrong in (dict(score="sum"), dict(chosen=0), dict(groups=2), dict(chosen_groups=2), dict(eps=1e-6), unsummed):
        with pytest.raises(ValueError, match="score|chosen"):
            Routing(**{"chosen": 3, **wrong})
    for score in ("softmax", "softmax_of_chosen"):
        with pytest.raises(ValueError, match=f"need score .sigmoid., got '{score}'"):
            Routing(3, score, rounded_scores=True)
    with pytest.raises(ValueError, match="rounded_scores need rounded_logits"):
        Routing(3, "sigmoid", rounded_scores=True, rounded_logits=False)


def mixture(case: str, dtype: torch.dtype = torch.float32) -> tuple[str, nn.Module]:
    """The first mixture of a tiny model, with its path."""
    with skipped_if_unknown():
        model = tiny_hybrid(case) if case in HYBRIDS else tiny_family(case)
    name, block = next((name, part) for name, part in model.named_modules() if is_mixture(part))
    block = block.to(dtype)
    for path in IN_FP32.get(case, ()):
        owner, _, tensor = path.rpartition(".")
        own = getattr(block.get_submodule(owner), tensor)
        own.data = own.data.float()
    return name, block


def read(case: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Experts:
    name, block = mixture(case, dtype)
    if not hasattr(block.experts, "is_transposed"):
        pytest.skip("transformers 4 has a list of modules")
    return read_experts(block.to(device), dtype, root=name)


@pytest.mark.parametrize("case", [*FAMILIES, *HYBRIDS])
def test_a_block_has_the_bits_of_transformers(case, device):
    """Those of its grouped path on a CPU, by the references in 16 bits; in fp32 sums may be in another order."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        found = read(case, dtype)
        assert found.weights is not None, found.reason
        x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
        want = found.module(x)
        want = want[0] if isinstance(want, tuple) else want
        got = total_of(feed_forward(make_operations(), found, x))
        assert dtype == torch.float32 or (got == want).float().mean() > 0.99
        torch.testing.assert_close(got, want, rtol=1e-5 if dtype == torch.float32 else 0.02, atol=1e-5)
        if dtype in DTYPES:
            there = read(case, dtype, device)
            kernels = total_of(feed_forward(make_operations(kernels=True), there, x.to(device))).cpu()
            torch.testing.assert_close(kernels, want, rtol=1e-4 if dtype == torch.float32 else 0.02, atol=1e-2)
        alone = total_of(feed_forward(make_operations(), found, x[:, 3:4]))
        torch.testing.assert_close(alone, want[:, 3:4], rtol=0.02, atol=1e-2)


@pytest.mark.parametrize("case", ["afmoe", "laguna", "minimax_m2", "hy_v3"])
def test_corrections_and_factors_are_read_in_the_router_and_beside_it(case):
    """In fp32 and bf16: a correction as it is stored, and a factor that stands in the router, or in the block."""
    factor = dict(afmoe=1.5, laguna=2.0, hy_v3=1.5).get(case, 1.0)
    for dtype in (torch.float32, torch.bfloat16):
        found = read(case, dtype)
        assert found.weights is not None, found.reason
        block, read_there = found.module, found.weights
        names = dict(afmoe="expert_bias", laguna="gate.e_score_correction_bias")
        owner, _, name = names.get(case, "e_score_correction_bias").rpartition(".")
        assert read_there.correction is getattr(block.get_submodule(owner), name)
        rounds = dtype == torch.bfloat16 and case != "hy_v3"  # whose router has fp32 weights
        routing = (read_there.routing.score, read_there.routing.scale, read_there.routing.rounded_logits)
        assert routing == ("sigmoid", factor, rounds)
        assert read_there.correction.dtype == (torch.float32 if case in IN_FP32 else dtype)
        x = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
        before = total_of(feed_forward(make_operations(), found, x))
        with torch.no_grad():
            read_there.correction.copy_(-2 * read_there.correction)
        changed = read_experts(block, dtype, root="mlp")
        after = total_of(feed_forward(make_operations(), changed, x))
        assert (after != before).any()
        torch.testing.assert_close(after, block(x), rtol=1e-5 if dtype == torch.float32 else 0.02, atol=1e-5)


def test_an_epsilon_is_heard_where_scores_are_small(device):
    x, weight, _, _, routing = router(device, torch.float32, ROUTINGS["rounded scores"], 64)
    x[:, 0], weight[:, 0] = -30, 1
    for module in (experts, reference):
        sums = [
            module.route(x, weight, None, None, replace(routing, eps=eps)).weights.float().sum(1)
            for eps in (1e-6, 1e-20)
        ]
        assert (sums[0] < 0.5).any() and torch.allclose(sums[1], torch.ones_like(sums[1]))


def test_more_rows_run_the_module():
    found = read("qwen3_moe")
    ops = make_operations()
    for rows, routed in ((MAX_ROWS, 1), (MAX_ROWS + 1, 0)):
        ops.calls.clear()
        x = torch.randn(1, rows, 64)
        torch.testing.assert_close(total_of(feed_forward(ops, found, x)), found.module(x), rtol=1e-4, atol=1e-5)
        assert ops.calls["route"] == routed


def _hooked(block: Any) -> None:
    block.experts.register_forward_hook(lambda module, args, out: None)


CALLED = {
    "has a forward hook": _hooked,
    "has jitter_noise 0.1": lambda block: setattr(block, "jitter_noise", 0.1),
    "has extra, which is not known": lambda block: block.add_module("extra", nn.Linear(2, 2)),
    "not stacked as in transformers 5": lambda block: setattr(block.experts, "more", nn.Parameter(torch.zeros(1))),
    "has experts.gate_up_proj in torch.float16": lambda block: block.experts.to(torch.float16),
    "has experts_implementation 'sonicmoe'": lambda block: setattr(
        block.experts, "config", type("Config", (), {"_experts_implementation": "sonicmoe"})
    ),
    "spread over ranks": lambda block: setattr(block.experts, "_is_expert_parallel", True),
    "another activation than SwiGLU": lambda block: setattr(block.experts, "act_fn", nn.ReLU()),
    "which chooses in an unknown way": lambda block: setattr(block.gate, "norm_topk_prob", False),
    "has other, which is not known": lambda block: block.register_buffer("other", torch.zeros(4)),
    "has other in its router, which is not read": lambda block: block.gate.register_buffer("other", torch.zeros(4)),
    "shared_expert_gate that is not a plain": lambda block: setattr(block, "shared_expert_gate", nn.Linear(64, 1)),
}


@pytest.mark.parametrize("reason", CALLED)
def test_a_block_that_is_not_understood_is_called(reason):
    name, block = mixture("mixtral")
    if not hasattr(block.experts, "is_transposed"):
        pytest.skip("transformers 4 has a list of modules")
    CALLED[reason](block)
    found = read_experts(block, torch.float32, root=name)
    assert found.weights is None and (found.chosen, found.count) == (2, 4)
    assert found.reason is not None and found.reason.startswith(name) and reason in found.reason


def test_what_is_read_is_watched():
    """Replaced weights and fields of a router are named; a block that is called is named in the report."""
    model = tiny_family("qwen3_moe")
    if not hasattr(model.model.layers[0].mlp.experts, "is_transposed"):
        pytest.skip("transformers 4 has a list of modules")
    prompt = torch.arange(2, 8)[None]
    changes = {
        "layers.0.mlp.experts.down_proj was replaced": lambda mlp: setattr(
            mlp.experts, "down_proj", nn.Parameter(mlp.experts.down_proj.detach().clone())
        ),
        "layers.0.mlp.gate.weight was replaced": lambda mlp: setattr(
            mlp.gate, "weight", nn.Parameter(mlp.gate.weight.detach().clone())
        ),
        "layers.0.mlp.gate.norm_topk_prob was changed": lambda mlp: setattr(mlp.gate, "norm_topk_prob", False),
        "layers.0.mlp.experts has got a forward hook": lambda mlp: mlp.experts.register_forward_hook(
            lambda module, args, out: 0 * out
        ),
    }
    for message, change in changes.items():
        with optimize_with_triton(model)[1] as originals:
            assert "mixtures" not in str(originals)
            model.generate(prompt, max_new_tokens=2)
            change(model.model.layers[0].mlp)
            with pytest.raises(RuntimeError, match=message):
                model.generate(prompt, max_new_tokens=2)
        model.model.layers[0].mlp.gate.norm_topk_prob = True
    with optimize_with_triton(model)[1] as originals:
        shown = str(originals)
        assert "1 mixtures are called as modules" in shown, shown
        assert "model.model.layers.0.mlp has a part that is not read" in shown
