"""What the entries that read a dataset for a model begin with."""

from pathlib import Path

from llava_fsdp.config import DataConfig, Source
from llava_fsdp.data.cost import CostModel
from llava_fsdp.data.loader import ModelShape
from llava_fsdp.data.shapes import ensure_shapes
from llava_fsdp.model.flops import count_flops
from llava_fsdp.model.llava import Llava


def draw_shapes(cfg: DataConfig) -> None:
    """The embedded dataset is drawn where it is not there yet."""
    if cfg.source is Source.shapes:
        ensure_shapes(Path(cfg.root or "."))


def shape_of(model: Llava) -> ModelShape:
    language = model.parts.language
    return ModelShape(
        image_tokens=model.image_tokens,
        image_size=model.parts.vision.image_size,
        max_length=language.max_position_embeddings,
        vocab_size=language.vocab_size,
        # without recomputation, whatever the run does: with and without it the same cut gives the same bits
        cost=CostModel(*count_flops(model, recompute=False)),
    )
