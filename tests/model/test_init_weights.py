"""Weights that are drawn depend on the seed and their name, and not on how they are cut."""

from pathlib import Path

import pytest
import torch
from small import make_config

from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.model.weights.init_weights import Drawn, DrawRule, Rule, draw_rule

NORMAL = DrawRule(Rule.NORMAL, 0.5)


def test_a_shard_is_rows_of_the_whole_and_every_name_has_values_of_its_own() -> None:
    whole = Drawn("a.weight", (7, 3), NORMAL, 1).rows(0, 7)
    assert torch.equal(Drawn("a.weight", (7, 3), NORMAL, 1).rows(2, 5), whole[2:5])
    assert not torch.equal(Drawn("b.weight", (7, 3), NORMAL, 1).rows(0, 7), whole)
    assert not torch.equal(Drawn("a.weight", (7, 3), NORMAL, 2).rows(0, 7), whole)


def test_every_kind_of_parameter_has_its_own_rule(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """The small model is 36 wide with 50 channels within, its tower 20 with 30; a patch has 3 * 14 * 14 numbers."""
    tiled = ["data.image_aspect_ratio=anyres", "model.patch_merge=spatial_unpad"]
    cfg = make_config(parts, dataset, tmp_path, *tiled).model
    model = build_llava(find_parts(cfg), cfg, torch.float32)
    ones, zeros = DrawRule(Rule.ONES), DrawRule(Rule.ZEROS)
    expected = {
        "image_newline": DrawRule(Rule.NORMAL, 36**-0.5),
        "multi_modal_projector.linear_1.weight": DrawRule(Rule.UNIFORM, 20**-0.5),
        "multi_modal_projector.linear_1.bias": DrawRule(Rule.UNIFORM, 20**-0.5),
        "multi_modal_projector.linear_2.bias": DrawRule(Rule.UNIFORM, 36**-0.5),
        "language_model.embed_tokens.weight": DrawRule(Rule.NORMAL, 0.5),
        "language_model.norm.weight": ones,
        "language_model.layers.0.input_layernorm.weight": ones,
        "language_model.layers.1.mlp.up_proj.weight": DrawRule(Rule.NORMAL, 36**-0.5),
        "language_model.layers.1.mlp.down_proj.weight": DrawRule(Rule.NORMAL, 50**-0.5),
        "lm_head.weight": DrawRule(Rule.NORMAL, 36**-0.5),
        "vision_tower.embeddings.class_embedding": DrawRule(Rule.NORMAL, 0.2),
        "vision_tower.embeddings.position_embedding.weight": DrawRule(Rule.NORMAL, 0.2),
        "vision_tower.embeddings.patch_embedding.weight": DrawRule(Rule.NORMAL, 0.3 * 588**-0.5),
        "vision_tower.pre_layrnorm.weight": ones,
        "vision_tower.pre_layrnorm.bias": zeros,
        "vision_tower.encoder.layers.0.self_attn.q_proj.bias": zeros,
        "vision_tower.encoder.layers.0.mlp.fc2.weight": DrawRule(Rule.NORMAL, 0.3 * 30**-0.5),
    }
    for name, rule in expected.items():
        found = draw_rule(model, name)
        assert found.kind is rule.kind and found.scale == pytest.approx(rule.scale, rel=1e-12), name


def test_what_each_rule_draws() -> None:
    """To the mean and the width; a uniform one to both its ends."""
    shape = (400, 70)
    ones, zeros = (Drawn("a", shape, DrawRule(rule), 1).rows(0, 400) for rule in (Rule.ONES, Rule.ZEROS))
    assert (ones == 1).all() and (zeros == 0).all()
    normal = Drawn("a", shape, DrawRule(Rule.NORMAL, 0.3), 1).rows(0, 400)
    assert abs(float(normal.mean())) < 0.01 and float(normal.std()) == pytest.approx(0.3, rel=0.03)
    uniform = Drawn("a", shape, DrawRule(Rule.UNIFORM, 0.3), 1).rows(0, 400)
    assert float(uniform.min()) == pytest.approx(-0.3, rel=0.01) and float(uniform.max()) == pytest.approx(
        0.3, rel=0.01
    )
    assert uniform.abs().max() <= 0.3
