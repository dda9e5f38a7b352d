"""Pixel shuffle and its projector against transformers' InternVL, bit for bit; what it is refused for, and the page
that says which projector is exported how."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed import build
from small import changed_parts, make_config
from test_flops import check_counts
from torch.nn import functional
from transformers import InternVLConfig, InternVLModel, InternVLVisionConfig, LlamaConfig
from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

from llava_fsdp.config import AspectRatio
from llava_fsdp.export.write.formats import check_hf, check_original
from llava_fsdp.model.llava.llava import Llava, build_llava
from llava_fsdp.model.llava.projector import Projector, pixel_shuffle
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.model.weights.init_weights import DrawRule, Rule, draw_rule
from llava_fsdp.model.weights.weight_names import in_adapter, ours, ours_in_adapter
from llava_fsdp.runtime.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SHUFFLE = "model.projector_type=pixel_shuffle{}x_mlp2x_gelu"


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("factor", "side", "width", "hidden"), [(2, 6, 5, 9), (4, 12, 3, 7), (8, 8, 1, 3)])
def test_features_are_transformers(factor: int, side: int, width: int, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(factor)
    config = InternVLConfig(
        downsample_ratio=1 / factor,
        vision_config=InternVLVisionConfig(hidden_size=width),
        text_config=LlamaConfig(hidden_size=hidden, num_attention_heads=1, head_dim=2),
    )
    theirs: Any = InternVLMultiModalProjector(config).to(dtype)
    own = Projector(f"pixel_shuffle{factor}x_mlp2x_gelu", width, hidden, factor).to(dtype)
    own.load_state_dict({name: torch.randn_like(value) for name, value in theirs.state_dict().items()})
    theirs.load_state_dict(own.state_dict())
    features = torch.randn(3, side * side, width, dtype=dtype)
    grid = features.view(3, side, side, width)
    expected = InternVLModel.pixel_shuffle(theirs, grid, scale_factor=1 / factor).flatten(1, 2)
    assert torch.equal(pixel_shuffle(features, factor), expected)
    assert torch.equal(own(features), theirs(expected))
    assert own(features[:0]).shape == (0, (side // factor) ** 2, hidden)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "layers"), [("linear", 1), ("mlp2x_gelu", 2), ("mlp12x_gelu", 12)])
def test_layers_of_a_projector(kind: str, layers: int) -> None:
    """As LLaVA's builder.py makes them: GELU, which is not approximated, between linear layers."""
    own = Projector(kind, 5, 7)
    assert [*own.state_dict()] == [f"linear_{n}.{leaf}" for n in range(1, layers + 1) for leaf in ("weight", "bias")]
    expected = features = torch.randn(2, 4, 5)
    for number in range(1, layers + 1):
        expected = own.get_submodule(f"linear_{number}")(expected if number == 1 else functional.gelu(expected))
    assert torch.equal(own(features), expected)


@pytest.mark.parametrize(("features", "hidden"), [(5, 7), (7, 5)])
def test_the_identity_changes_no_width(features: int, hidden: int) -> None:
    values = torch.randn(2, 4, 5)
    assert torch.equal(Projector("identity", 5, 5)(values), values)
    with pytest.raises(ConfigError, match=f"here they are {features} and {hidden} wide"):
        Projector("identity", features, hidden)


@pytest.mark.parametrize(
    ("factor", "vision", "values", "said"),
    [
        (2, {"image_size": 42}, [], "3 x 3"),
        (4, {}, [], "2 x 2"),
        (2, {}, ["model.select_feature=full"], "model.select_feature=patch"),
    ],
    ids=["odd", "too large a factor", "CLS token"],
)
def test_a_grid_that_cannot_be_divided_is_refused(
    factor: int, vision: dict[str, int], values: list[str], said: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    folder = changed_parts(parts, tmp_path / "parts", vision=vision)
    cfg = make_config(folder, dataset, tmp_path / "run", SHUFFLE.format(factor), *values)
    with pytest.raises(ConfigError, match=f"{SHUFFLE.format(factor)} .*{said}"):
        build(cfg)


def shuffled(parts: Path, to: Path, dataset: Path, *values: str) -> Any:
    """A configuration with pixel shuffle over a grid of 4 x 4 features: an image has 4 tokens."""
    folder = changed_parts(parts, to / "parts", vision={"patch_size": 7})
    return make_config(folder, dataset, to / "run", SHUFFLE.format(2), *values)


def test_its_parameters_start_as_transformers_start_them(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """The projector's first layer gets 4 * 20 values. Names in adapter files are transformers', and come back."""
    cfg = shuffled(parts, tmp_path, dataset).model
    model = build_llava(find_parts(cfg), cfg, torch.float32)
    norm, linear = "multi_modal_projector.layer_norm.", "multi_modal_projector.linear_1.weight"
    assert draw_rule(model, f"{norm}weight").kind is Rule.ONES
    assert draw_rule(model, f"{norm}bias").kind is Rule.ZEROS
    assert draw_rule(model, linear) == DrawRule(Rule.UNIFORM, 80**-0.5)
    assert (model.probe.features, model.image_tokens) == (16, 4)
    for name in (f"{norm}weight", f"{norm}bias", linear):
        written = in_adapter(name, cfg.projector_type)
        assert written == f"base_model.model.model.{name}"
        assert ours_in_adapter(written) == ours(f"model.{name}") == name


@pytest.mark.parametrize("train", ["[projector]", "[projector,language,vision]"])
@pytest.mark.slow
def test_its_products_are_counted(train: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Its norm trains, so the first layer's input gets a gradient, also behind a frozen tower."""
    model = build(shuffled(parts, tmp_path, dataset, f"model.train={train}")).model
    assert isinstance(model, Llava)
    check_counts(model, activation_checkpointing=False, pack=True)


def test_the_page_says_which_projector_is_exported_how(parts: Path, dataset: Path, tmp_path: Path) -> None:
    tower = {"model_type": "internvl_vision", "hidden_size": 36, "image_size": [28, 28], "patch_size": [7, 7]}
    folder = changed_parts(parts, tmp_path / "parts", vision=tower)
    rows = re.findall(r"^\| (\w+) \| (yes|refused)\b.* \| (yes|refused)\b.*\|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 5
    for kind, *said in rows:
        cfg = make_config(folder, dataset, tmp_path / "run", f"model.projector_type={kind}").model
        model = build_llava(find_parts(cfg), cfg, torch.float32)
        checks = (lambda: check_hf(model, AspectRatio.pad)), (lambda: check_original(model))  # noqa: B023
        assert [verdict(check) for check in checks] == said, kind


def verdict(check: Callable[[], None]) -> str:
    try:
        check()
    except ConfigError:
        return "refused"
    return "yes"
