"""What the configuration of a model folder may say, to the last number that is allowed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small import write_json

from llava_fsdp.config import Feature
from llava_fsdp.model.pretrained import (
    check_named_language,
    check_same_model,
    check_selection,
    check_sizes,
    find_folder,
    trained_vocabulary,
)
from llava_fsdp.runtime.errors import ConfigError, ModelError

LARGEST = {
    "hidden_size": 2**17, "intermediate_size": 2**20, "num_hidden_layers": 2**10, "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12, "vocab_size": 2**24, "max_position_embeddings": 2**26, "image_size": 2**13,
    "patch_size": 2**10, "num_channels": 2**8,
}  # fmt: skip


@pytest.mark.parametrize("field", LARGEST)
@pytest.mark.parametrize("part", [None, "text_config", "vision_config"])
def test_sizes_have_an_end(field: str, part: str | None, tmp_path: Path) -> None:
    def of(value: object) -> Any:
        own = SimpleNamespace(**{field: value})
        return own if part is None else SimpleNamespace(**{part: own})

    for value in (None, 1, LARGEST[field]):
        check_sizes(of(value), tmp_path)
    for value in (0, LARGEST[field] + 1, True, 2.0, "3"):
        with pytest.raises(ModelError, match=field):
            check_sizes(of(value), tmp_path)


@pytest.mark.parametrize(
    ("rows", "image_id", "expected"),
    [(100, 99, 99), (164, 100, 100), (165, 100, 165), (100, 100, 100), (100, 101, 100)],
)
def test_rows_behind_the_image_tag_were_not_trained(rows: int, image_id: int, expected: int, tmp_path: Path) -> None:
    """Of a folder without notes, where at most 64 rows follow: an image tag in the middle is one of the model's own."""
    config = SimpleNamespace(text_config=SimpleNamespace(vocab_size=rows), image_token_index=image_id)
    assert trained_vocabulary(tmp_path, config) == expected


def test_the_notes_say_how_many_rows_were_trained(tmp_path: Path) -> None:
    config = SimpleNamespace(text_config=SimpleNamespace(vocab_size=100), image_token_index=99)
    for rows in (1, 57, 100):
        write_json(tmp_path / "llava_fsdp.json", {"vocab_size": rows})
        assert trained_vocabulary(tmp_path, config) == rows
    for wrong in (0, 101, True, 5.0, None):
        write_json(tmp_path / "llava_fsdp.json", {"vocab_size": wrong})
        with pytest.raises(ModelError, match="vocab_size"):
            trained_vocabulary(tmp_path, config)


def test_a_checkpoint_takes_the_features_that_it_was_trained_on(tmp_path: Path) -> None:
    def check(layer: int, strategy: str, positions: int, feature: Feature) -> None:
        config = SimpleNamespace(
            vision_feature_layer=layer,
            vision_feature_select_strategy=strategy,
            vision_config=SimpleNamespace(image_size=42, patch_size=14),
            image_seq_length=positions,
        )
        projector = {"projector_type": "mlp2x_gelu", "shuffle_factor": 1}
        cfg: Any = SimpleNamespace(select_layer=-2, select_feature=feature, **projector)
        check_selection(config, cfg, tmp_path)

    check(-2, "default", 9, Feature.patch)
    check(-2, "full", 10, Feature.full)
    check(-2, "default", 9, Feature.auto)
    check(-2, "full", 10, Feature.auto)
    for layer, strategy in ((-1, "default"), (-2, "full")):
        with pytest.raises(ConfigError):
            check(layer, strategy, 9, Feature.patch)
    with pytest.raises(ConfigError):
        check(-1, "default", 9, Feature.auto)
    for positions in (8, 10):
        with pytest.raises(ModelError, match="image_seq_length"):
            check(-2, "default", positions, Feature.patch)


def test_a_projector_is_for_one_language_model_and_one_tower(tmp_path: Path) -> None:
    write_json(tmp_path / "llava_fsdp.json", {"language": "a", "vision": "b"})

    def check(language: str, vision: str) -> None:
        cfg: Any = SimpleNamespace(model=SimpleNamespace(language=language, vision=vision))
        check_same_model(tmp_path, cfg)

    check("a", "b")
    for language, vision in (("a", "c"), ("c", "b")):
        with pytest.raises(ConfigError, match=r"model\.projector=auto"):
            check(language, vision)


def test_parts_that_a_checkpoint_would_not_read_are_refused(tmp_path: Path) -> None:
    """A stage may have set the checkpoint; a language model that the user names beside it must be the checkpoint's."""
    write_json(tmp_path / "llava_fsdp.json", {"language": str(tmp_path / "a")})
    own: Any = SimpleNamespace(name="own", language=f"{tmp_path}/./a", checkpoint="x")
    check_named_language(own, tmp_path)
    for name, language in (("own", "x"), ("tiny", "b")):
        other: Any = SimpleNamespace(name=name, language=language, checkpoint="x")
        check_named_language(other, tmp_path)
    own.language = str(tmp_path / "b")
    with pytest.raises(ConfigError, match=r"made of model\.language=.*/a, .*model\.language=.*/b, which would not"):
        check_named_language(own, tmp_path)


@pytest.mark.parametrize(("parent", "own"), [(0o755, 0o777), (0o777, 0o755)])
def test_a_folder_that_every_user_can_write_is_told(
    parent: int, own: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder itself counts: a private one may lie in a folder like /tmp."""
    folder = tmp_path / "parent" / "model"
    folder.mkdir(parents=True)
    folder.chmod(own)
    folder.parent.chmod(parent)
    assert find_folder(str(folder), "model.vision") == folder
    assert [f"model.vision={folder} " in text for text in caplog.messages] == [True] * (own == 0o777)
