"""How deep to draft: the kernels against their references, these against the rule in Python, and the engine's trees."""

import math

import pytest
import torch

from eagle_triton import EAGLEConfig, EAGLEInference, EaModel
from eagle_triton.demo import demo_prompts
from eagle_triton.engine.drafts.beams import LEVELS
from eagle_triton.inference.speculative_config import SpeculativeConfig
from eagle_triton.operands.adaptive_length import EGAGConfig, GuideTensors
from eagle_triton.ops import adaptive_length
from eagle_triton.reference import adaptive_length as reference
from eagle_triton.speculative_decoding import speculative_generate
from eagle_triton.speculative_decoding.egag import EntropyGuide
from tests.tiny import noisy, tiny_model

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
INF, NAN = math.inf, math.nan
BOTH = pytest.mark.parametrize("module", [reference, adaptive_length], ids=["reference", "kernels"])


class TestRowEntropy:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("shape", [(1, 4), (3, 100), (2, 2048), (5, 5000), (70, 33)])
    def test_kernel_equals_reference(self, shape, dtype):
        generator = torch.Generator().manual_seed(shape[1])
        logits = (torch.randn(shape, generator=generator) * 4).to(dtype).to(DEVICE)
        logits[0, 1] = -INF
        expected = reference.row_entropy(logits.double().float())
        torch.testing.assert_close(adaptive_length.row_entropy(logits), expected, rtol=1e-5, atol=1e-5)

    @BOTH
    def test_known_values(self, module):
        rows = torch.tensor([[0.25] * 4, [1.0, 0, 0, 0], [0.97, 0.01, 0.01, 0.01], [0.7, 0.1, 0.1, 0.1]], device=DEVICE)
        entropy = module.row_entropy(rows.log())
        torch.testing.assert_close(entropy.cpu(), torch.tensor([math.log(4), 0, 0.16770, 0.94045]), rtol=0, atol=1e-5)
        assert bool((entropy >= 0).all())

    @BOTH
    def test_wide_and_strided_rows(self, module):
        logits = torch.zeros(2, 8192, device=DEVICE)
        logits[1, ::2] = -INF
        torch.testing.assert_close(module.row_entropy(logits).cpu(), torch.tensor([math.log(8192), math.log(4096)]))
        torch.testing.assert_close(module.row_entropy(logits[:, ::2]).cpu()[0], torch.tensor(math.log(4096)))
        shifted = torch.full((1, 3000), 1e4, device=DEVICE)
        torch.testing.assert_close(module.row_entropy(shifted).cpu(), torch.tensor([math.log(3000)]))

    @BOTH
    def test_what_has_no_entropy_is_nan(self, module):
        rows = torch.zeros(4, 3000, device=DEVICE)
        rows[0, 2999], rows[1, 5], rows[2] = NAN, INF, -INF
        assert module.row_entropy(rows).isnan().tolist() == [True, True, True, False]

    @BOTH
    def test_bad_input(self, module):
        for logits in (torch.zeros(4), torch.zeros(2, 0), torch.zeros(2, 3, dtype=torch.int64)):
            with pytest.raises(ValueError, match="row_entropy: logits must be floats"):
                module.row_entropy(logits)


def some_guide(values=((NAN,) * 4,), root=(-1,)):
    return GuideTensors(
        torch.tensor(values, dtype=torch.float64, device=DEVICE), torch.tensor(root, dtype=torch.int32, device=DEVICE)
    )


def entropies(*values):
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class TestChooseGamma:
    @BOTH
    @pytest.mark.parametrize(
        "config",
        [
            EGAGConfig(1, 6),
            EGAGConfig(2, 5, 0.9),
            EGAGConfig(1, 9, 0.3, scale=3.0),
            EGAGConfig(1, 4, mode="stop"),
        ],
        ids=lambda config: f"{config.mode}-{config.gamma_max}",
    )
    def test_it_is_the_rule_of_a_generation(self, module, config):
        generator = torch.Generator().manual_seed(7)
        batch, steps = 40, 6
        guide, guides = GuideTensors.new(batch, torch.device(DEVICE)), [EntropyGuide(config) for _ in range(batch)]
        for step in range(steps):
            logits = torch.randn(batch, 50, generator=generator) * torch.rand(batch, 1, generator=generator) * 12
            values = reference.row_entropy(logits)
            gammas = [rule.gamma(row) for rule, row in zip(guides, logits, strict=True)]
            module.choose_gamma(values.to(DEVICE), lengths(*[step] * batch), guide, config, 50)
            assert guide.gamma.tolist() == gammas
            assert guide.values[:, 0].tolist() == pytest.approx([rule.h_norm for rule in guides], abs=1e-6)
            assert guide.values[:, 1].tolist() == pytest.approx([rule.h_ema for rule in guides], abs=1e-6)

    @BOTH
    def test_the_same_root_counts_once(self, module):
        config, guide = EGAGConfig(1, 6, 0.5), some_guide()
        for length, value, average in ((5, 0.0, 0.0), (8, 1.0, 0.5), (8, 1.0, 0.5), (8, 0.5, 0.25), (9, 1.0, 0.625)):
            module.choose_gamma(entropies(value * math.log(50)), lengths(length), guide, config, 50)
            assert float(guide.values[0, 1]) == pytest.approx(average, abs=1e-6)

    @BOTH
    def test_a_nan_is_no_part_of_an_average(self, module):
        config, guide = EGAGConfig(2, 6, 0.5), some_guide(((0, 0.25, 6, 0.0),), (3,))
        module.choose_gamma(entropies(NAN), lengths(4), guide, config, 50)
        assert float(guide.gamma) == 2 and float(guide.values[0, 1]) == 0.25
        module.choose_gamma(entropies(0.0), lengths(5), guide, config, 50)
        assert float(guide.values[0, 1]) == 0.125

    @BOTH
    def test_bad_input(self, module):
        good = entropies(1.0), lengths(4), some_guide()
        with pytest.raises(ValueError, match="expected a gamma_max and a vocabulary"):
            module.choose_gamma(*good, EGAGConfig(), 50)
        with pytest.raises(ValueError, match=r"entropy must be contiguous float32 \[1\]"):
            module.choose_gamma(entropies(1.0, 2.0), *good[1:], EGAGConfig(1, 6), 50)
        with pytest.raises(ValueError, match=r"guide.root must be contiguous int32"):
            wrong = GuideTensors(good[2].values, good[2].root.long())
            module.choose_gamma(*good[:2], wrong, EGAGConfig(1, 6), 50)


class TestClipDepth:
    CONFIG = EGAGConfig(1, 4)

    def candidates(self, batch=3):
        """Chains of two, in flat order: six candidates, three levels."""
        tokens = torch.arange(6, device=DEVICE).repeat(batch, 1)
        scores = -torch.arange(6, dtype=torch.float32, device=DEVICE).repeat(batch, 1)
        return tokens, scores, lengths(1, 1, 2, 2, 3, 3)

    @BOTH
    def test_by_gamma_and_by_room(self, module):
        tokens, scores, depths = self.candidates()
        guide = some_guide(((0, 0, 2, 0), (0, 0, 3, 0), (0, 0, 3, 0)), (0, 0, 0))
        module.clip_depth(tokens, scores, depths, guide, lengths(9, 9, 9), lengths(99, 99, 12), self.CONFIG)
        assert (tokens >= 0).sum(1).tolist() == [4, 6, 4]  # 12 - 9 - 1: two drafts behind the root
        assert torch.equal(tokens < 0, scores == -INF) and guide.gamma.tolist() == [2, 3, 3]
        assert tokens[0].tolist() == [0, 1, 2, 3, -1, -1]

    @BOTH
    def test_no_room_at_all(self, module):
        tokens, scores, depths = self.candidates(5)
        guide = some_guide(((0, 0, 3, 0),) * 5, (0,) * 5)
        last = lengths(*[100] * 5)
        module.clip_depth(tokens, scores, depths, guide, lengths(95, 96, 97, 98, 99), last, self.CONFIG)
        assert ((tokens >= 0).sum(1) / 2).tolist() == [3, 3, 2, 1, 0]

    @BOTH
    def test_where_drafting_stopped(self, module):
        tokens, scores, depths = self.candidates()
        scores[0, 2:], scores[1, 4:], scores[2, 5] = -INF, -INF, -INF
        guide = some_guide(((0, 0, 4, 0),) * 3, (0,) * 3)
        module.clip_depth(tokens, scores, depths, guide, lengths(1, 1, 1), lengths(99, 99, 99), self.CONFIG, 3)
        assert guide.gamma.tolist() == [1, 2, 4]  # the last went as deep as was scored
        assert (tokens >= 0).sum(1).tolist() == [2, 4, 5]

    @BOTH
    def test_bad_input(self, module):
        tokens, scores, depths = self.candidates(1)
        rest = some_guide(), lengths(4), lengths(9), self.CONFIG
        with pytest.raises(ValueError, match="clip_depth: scores must be contiguous float32"):
            module.clip_depth(tokens, scores.double(), depths, *rest)
        with pytest.raises(ValueError, match="clip_depth: depths"):
            module.clip_depth(tokens, scores, depths.long(), *rest)


class TestConfig:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"gamma_min": 0}, "gamma_min must be at least 1, got 0"),
            ({"gamma_min": 3, "gamma_max": 2}, "gamma_max must be at least gamma_min"),
            ({"ema_beta": 1.0}, "ema_beta must be at least 0 and below 1"),
            ({"ema_beta": -0.1}, "ema_beta"),
            ({"scale": 0.0}, "scale must be above 0"),
            ({"mode": "never"}, "mode must be"),
            ({"mode": "stop", "scale": 3.0}, "uses each entropy by itself"),
            ({"stop_threshold": 0.9}, "stop_threshold=0.9 needs mode .stop."),
            ({"gamma_min": 1.5}, "gamma_min must be an integer, got 1.5"),
            ({"gamma_max": True}, "gamma_max must be an integer"),
            ({"exact": "no"}, "exact must be True or False"),
            ({"ema_beta": "x"}, "ema_beta must be a number"),
        ],
    )
    def test_values_that_cannot_be(self, options, message):
        with pytest.raises((ValueError, TypeError), match=message):
            EGAGConfig(**options)

    def test_it_must_fit_what_is_drafted(self):
        with pytest.raises(ValueError, match="gamma_max must be at most 4"):
            EAGLEConfig(topk=1, num_steps=4, num_draft_tokens=5, egag=EGAGConfig(1, 6))
        with pytest.raises(ValueError, match="gamma_min must be at most 2"):
            EAGLEConfig(
                speculative=SpeculativeConfig(method="draft_model", num_speculative_tokens=2), egag=EGAGConfig(3)
            )
        with pytest.raises(ValueError, match="method suffix has none"):
            EAGLEConfig(speculative=SpeculativeConfig(method="suffix"), egag=EGAGConfig())
        with pytest.raises(TypeError, match="egag must be an EGAGConfig"):
            EAGLEConfig(egag=True)

    def test_repetition_alone_has_no_entropy(self):
        model = tiny_model().base_model.to(DEVICE)
        with pytest.raises(ValueError, match="egag needs a draft that scores candidates"):
            EAGLEInference(None, model, EAGLEConfig(suffix_drafts=4, egag=EGAGConfig()))


RULES = [
    EGAGConfig(),
    EGAGConfig(ema_beta=0.9),
    EGAGConfig(scale=3.0, exact=True),
    EGAGConfig(gamma_min=2, scale=2.0),
    EGAGConfig(mode="stop"),
    EGAGConfig(mode="stop", stop_threshold=0.6, exact=True),
]
TREES = {
    "chain": {"topk": 1, "num_steps": 6, "num_draft_tokens": 7},
    "tree": {"topk": 4, "num_steps": 4, "num_draft_tokens": 20},
}


@pytest.fixture(scope="module")
def demo():
    return EaModel.from_pretrained("demo").to(DEVICE)


def answers(inference, prompts, count=20, **options):
    """The tokens of each prompt, decoded together, and the pieces behind the first of each."""
    tokens, pieces = [[] for _ in prompts], []
    for piece in inference.stream(prompts, count, **options):
        if tokens[piece.index]:
            pieces.append(piece)
        else:
            assert piece.tree is None and piece.egag is None and len(piece.tokens) == 1  # behind the prompt
        tokens[piece.index] += piece.tokens
    return tokens, pieces


@pytest.fixture(scope="module")
def by_the_target(demo):
    return answers(EAGLEInference(None, demo, SpeculativeConfig()), demo_prompts(2))[0]


class TestEngine:
    @pytest.mark.parametrize(
        ("tree", "rule"),
        [*(("chain", rule) for rule in RULES), ("tree", RULES[0]), ("tree", RULES[-1])],
        ids=lambda value: value if isinstance(value, str) else f"{value.mode}-{value.scale}-{value.ema_beta}",
    )
    def test_the_output_is_the_targets(self, demo, by_the_target, tree, rule):
        inference = EAGLEInference(None, demo, EAGLEConfig(**TREES[tree], fallback=False, egag=rule))
        found, pieces = answers(inference, demo_prompts(2), report_drafts=True)
        assert found == by_the_target
        depth = TREES[tree]["num_steps"]
        for piece in pieces:
            assert rule.gamma_min <= piece.egag.gamma <= depth and piece.proposed == len(piece.drafts)
            assert piece.accepted <= piece.egag.gamma and 0 <= piece.egag.h_norm <= 1
            assert piece.egag.levels == depth if rule.exact else 1 <= piece.egag.levels <= depth
            if tree == "chain":
                assert piece.proposed <= min(piece.egag.gamma, piece.egag.levels)
        assert len({piece.egag.gamma for piece in pieces}) > 1
        if not rule.exact:  # passes were saved, and counted
            assert inference.statistics["total_draft_forward"] < len(pieces) * depth

    def test_sampled_output_is_the_targets_too(self, demo):
        outputs = []
        for egag in (None, EGAGConfig(scale=3.0)):
            config = EAGLEConfig(**TREES["chain"], fallback=False, egag=egag, temperature=0.9)
            outputs.append(answers(EAGLEInference(None, demo, config), demo_prompts(2), seed=5)[0])
        assert outputs[0] == outputs[1]

    @pytest.mark.parametrize(
        "rule",
        [
            EGAGConfig(1, 5, 0.5, exact=True),
            EGAGConfig(2, 5, scale=3.0, exact=True),
            EGAGConfig(1, 5, mode="stop", exact=True),
        ],
        ids=["average", "scale", "stop"],
    )
    def test_steps_are_those_of_the_function(self, rule):
        """The same numbers, step for step, as decoding by the models' own forward."""
        target = tiny_model(eagle3=False, layers=2).base_model.to(DEVICE)
        target.lm_head.weight.data *= 2  # as sure as a trained one
        drafter = noisy(target, 0.3)
        prompt, trace = [5, 9, 2, 7, 7, 1], []
        options = {"egag_scale": rule.scale, "egag_mode": rule.mode, "egag_ema_beta": rule.ema_beta}
        options |= {"gamma_min": rule.gamma_min}
        expected, _ = speculative_generate(
            prompt, drafter, target, gamma=5, use_egag=True, max_gen_len=24, eos_tokens_id=10**6, use_cache=True,
            trace=trace, **options,
        )  # fmt: skip
        config = EAGLEConfig(
            speculative=SpeculativeConfig(method="draft_model", num_speculative_tokens=5), egag=rule, fallback=False
        )
        tokens, pieces = answers(EAGLEInference(drafter, target, config), [prompt], 24, stop_token_ids=[])
        assert tokens == [expected]
        steps = [step for step in trace if step.gamma is not None]
        assert len({step.gamma for step in steps}) > 1
        total = 1
        for piece, step in zip(pieces, steps, strict=False):
            if total > 24 - 7:  # at the end the engine may draft one token more
                break
            total += step.emitted
            assert (piece.egag.gamma, piece.proposed, piece.accepted) == (step.gamma, step.proposed, step.accepted)
            assert piece.egag[:2] == pytest.approx((step.h_norm, step.h_ema), abs=1e-4)
        assert total > 15

    def test_the_end_costs_no_step_more_than_without(self, demo):
        """A rule that is always sure drafts as a fixed chain does, up to the last token."""
        found = []
        for egag in (None, EGAGConfig(gamma_min=6, exact=True)):
            config = EAGLEConfig(**TREES["chain"], fallback=False, egag=egag)
            inference = EAGLEInference(None, demo, config)
            found.append([])
            for count in (8, 9, 13, 15):
                inference.reset_statistics()
                answers(inference, demo_prompts(2), count)
                found[-1].append((inference.statistics.steps, inference.statistics.draft_forwards))
        assert found[0] == found[1]

    def test_a_seeded_request_does_not_depend_on_its_neighbours(self, demo):
        """Where tokens depend on the tree, all levels are scored whatever the others' gammas are."""
        config = EAGLEConfig(
            **TREES["chain"], fallback=False, egag=EGAGConfig(scale=3.0), verify_strategy="rejection", temperature=1.0
        )
        prompts = demo_prompts(3)
        alone = answers(EAGLEInference(None, demo, config), prompts[:1], seed=[1])[0]
        together = answers(EAGLEInference(None, demo, config), prompts, seed=[1, 7, 8])[0]
        assert together[0] == alone[0]

    def test_levels_follow_the_largest_gamma(self, demo):
        config = EAGLEConfig(**TREES["chain"], fallback=False, egag=EGAGConfig(scale=3.0))
        draft, tree = EAGLEInference(None, demo, config).pair.draft, config.tree()
        assert [draft.levels_for(tree, gamma) for gamma in (1, 2, 3, 4, 5, 6, INF)] == [1, 2, 3, 4, 5, None, None]
        exact = EAGLEInference(None, demo, config.changed(egag=EGAGConfig(exact=True))).pair.draft
        assert exact.levels_for(tree, 1) is None and LEVELS[0] == 1

    def test_a_tree_that_is_grown_again_counts_once(self, demo):
        """A change of trees grows the next one from the same root."""
        config = EAGLEConfig(**TREES["chain"], fallback=False, egag=EGAGConfig(ema_beta=0.9, exact=True))
        inference, readings = EAGLEInference(None, demo, config), []
        for changing in (False, True):
            with inference.session(rows=400) as session:
                session.submit(demo_prompts(1)[0], 24)
                found = []
                while not session.idle:
                    found += [piece.egag.h_ema for piece in session.step() if piece.tree is not None]
                    batch = session._batch
                    if changing and batch.running:
                        from eagle_triton.engine.prefill import grow_first_tree

                        with batch.engine.running():
                            grow_first_tree(batch.engine.ops, batch.engine.draft, batch.state)
                readings.append(found)
        assert readings[0] and readings[0] == pytest.approx(readings[1], abs=1e-6)
