"""What the configuration of a model folder may say, to the last number that is allowed."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small import write_json
from transformers import CLIPVisionConfig, LlavaConfig, LlavaNextConfig, LlavaOnevisionConfig

from llava_fsdp.config import Feature, PatchMerge
from llava_fsdp.model.parts import Parts
from llava_fsdp.model.sources import pretrained
from llava_fsdp.model.sources.pretrained import (
    NoProjector,
    artifacts_of,
    check_named_language,
    check_same_model,
    check_selection,
    check_sizes,
    find_folder,
    find_parts,
    find_projector,
    grids_of,
    max_tiles_of,
    resolve_model,
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
    def check(layer: int, strategy: str, positions: int, feature: Feature, **tower: int) -> None:
        config = SimpleNamespace(
            vision_feature_layer=layer,
            vision_feature_select_strategy=strategy,
            vision_config=SimpleNamespace(image_size=42, patch_size=14, **tower),
            image_seq_length=positions,
        )
        projector = {"projector_type": "mlp2x_gelu", "shuffle_factor": 1}
        cfg: Any = SimpleNamespace(select_layer=-2, select_feature=feature, **projector)
        check_selection(config, cfg, tmp_path)

    check(-2, "default", 9, Feature.patch)
    check(-2, "full", 10, Feature.full)
    check(-2, "default", 9, Feature.auto)
    check(-2, "full", 10, Feature.auto)
    check(-2, "default", 13, Feature.auto, num_register_tokens=4)
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


def test_a_name_is_a_folder_of_the_package_or_here_or_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pretrained, "download", lambda name, key: Path("hub") / name)
    monkeypatch.setattr(pretrained, "is_open_to_others", lambda path: path.name == "open")
    for name in ("mine", "open"):
        (tmp_path / name).mkdir()
        assert find_folder(str(tmp_path / name), "model.vision") == tmp_path / name
    assert [f"{tmp_path / 'open'} can be written by every user" in line for line in caplog.messages] == [True]
    assert find_folder("package:tiny-llama", "model.language").name == "tiny-llama"
    assert find_folder("some/model-7b.v1", "model.language") == Path("hub/some/model-7b.v1")
    (tmp_path / "file").write_text("")
    wrong = {
        "package:none": "ships no such model",
        "a/b/c": "is not a folder",
        str(tmp_path / "file"): "is a file, not",
    }
    for name, said in wrong.items():
        with pytest.raises(ConfigError, match=f"model.language={name}.* {said}"):
            find_folder(name, "model.language")


def test_what_is_no_whole_model_is_named_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's export, an adapter, a run without an export, a checkpoint, another folder, the run of another stage."""
    monkeypatch.setattr(pretrained, "resolve", lambda name, key: Path(name))
    monkeypatch.chdir(tmp_path)
    for name, file in (
        ("export", "export/config.json"), ("model", "config.json"), ("adapter", "adapter_config.json"),
        ("run", "config.yaml"), ("checkpoint", "manifest.json"), ("other", "x.json"),
    ):  # fmt: skip
        write_json(tmp_path / name / file, {})
    assert resolve_model("export", "key") == Path("export/export") and resolve_model("model", "key") == Path("model")
    said = {
        "adapter": "is an adapter, not a whole model", "run": "is a run without an export",
        "checkpoint": "is a checkpoint of a run", "other": "has no config.json",
    }  # fmt: skip
    for name, words in said.items():
        with pytest.raises(ModelError, match=f"key={name} {words}"):
            resolve_model(name, "key")
    with pytest.raises(ConfigError, match="llava-fsdp train stage=pretrain output_dir=outputs/pretrain"):
        resolve_model("outputs/pretrain", "key")
    assert resolve_model("outputs/mine", "key") == Path("outputs/mine")


def test_where_the_projector_of_a_training_is(tmp_path: Path) -> None:
    """None: it is drawn, or it comes with a checkpoint or an adapter. Else a path, or the run of stage 1."""

    def found(given: str = "auto", **change: Any) -> Path | None:
        model: dict[str, Any] = {
            "projector": given, "checkpoint": None, "projector_type": "mlp2x_gelu", "language": "l", "vision": "v",
            "lora": SimpleNamespace(checkpoint=change.pop("adapter", None)), "random_weights": False, "name": "own",
        }  # fmt: skip
        cfg: Any = SimpleNamespace(model=SimpleNamespace(**(model | change)), output_dir=str(tmp_path / "finetune"))
        return find_projector(cfg)

    assert found("random") is found(checkpoint="x") is found(projector_type="identity") is found(adapter="x") is None
    assert found(random_weights=True) is None
    with pytest.raises(ConfigError, match="give one of the two"):
        found("given", checkpoint="x")
    with pytest.raises(ConfigError, match=r"model\.projector=.*gone does not exist"):
        found(str(tmp_path / "gone"))
    with pytest.raises(NoProjector, match=r"(?s)there is no .*stage=pretrain model\.language=l model\.vision=v"):
        found()
    (tmp_path / "mm_projector.bin").write_text("")
    assert found(str(tmp_path / "mm_projector.bin"), adapter="x") == tmp_path / "mm_projector.bin"
    run = tmp_path / "pretrain"
    run.mkdir()
    for random in (False, True):
        with pytest.raises(NoProjector, match=r"(?s)pretrain is not a run.*stage=pretrain model=tiny "):
            found(random_weights=random, name="tiny")
    with pytest.raises(ModelError, match="has no weights"):
        found(str(run))
    write_json(run / "export" / "llava_fsdp.json", {"language": "l", "vision": "v"})
    (run / "export" / "mm_projector.bin").touch()
    assert found() == found(str(run)) == run / "export" and found(random_weights=True) == run / "export"
    with pytest.raises(ConfigError, match=r"trained for model\.vision=v, not w"):
        found(vision="w")


STOPPED: dict[str, Any] = {"class": "stopped", "exit_code": 75, "step": 7, "reason": "SIGTERM"}


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"status": "stopped", **STOPPED}, "was stopped at step 7: run its command again"),
        ({"status": "interrupted", **STOPPED, "class": "interrupted"}, "was interrupted at step 7: run its command"),
        ({"status": "running", "step": None}, "was killed after step 5: run its command again"),
        ({"status": "failed", **STOPPED, "class": "model", "reason": "logits differ"}, r"step 7 \(logits differ\)"),
        ({"status": "done", "step": 9}, "has finished without an export"),
        (None, "without an export"),
    ],
)
def test_a_run_that_was_stopped_before_its_export_is_told_as_such(
    status: dict[str, Any] | None, said: str, tmp_path: Path
) -> None:
    """Before its configuration is written there as after that; by the run's folder as by that of its export."""
    run = tmp_path / "stage1"
    (run / "checkpoints" / "step-000005").mkdir(parents=True)
    (run / "export.tmp").mkdir()
    (run / "export.tmp" / "model.safetensors").touch()
    if status is not None:
        write_json(run / "run_status.json", status)
    for name in (str(run), str(run / "export")):
        model = SimpleNamespace(projector=name, checkpoint=None, projector_type="linear")
        with pytest.raises(NoProjector, match=f"model.projector={name} .*{said}"):
            find_projector(SimpleNamespace(model=model, output_dir=str(tmp_path / "own")))  # pyright: ignore
        with pytest.raises(ModelError, match=f"key={name} .*{said}"):
            resolve_model(name, "key")


def test_an_export_that_failed_is_no_projector(tmp_path: Path) -> None:
    for name in ("run/export.tmp", "run/export.tmp/model.safetensors"):
        file = tmp_path / "run" / "export.tmp" / "model.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        model = SimpleNamespace(projector=str(tmp_path / name), checkpoint=None, projector_type="linear")
        with pytest.raises(ModelError, match=r"export\.tmp holds"):
            find_projector(SimpleNamespace(model=model, output_dir=str(tmp_path / "own")))  # pyright: ignore


def test_weights_that_would_not_be_read_are_refused(tmp_path: Path) -> None:
    """With random weights: of the language model as of the tower, in each form."""
    names = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"
    for part in ("language", "vision"):
        write_json(tmp_path / part / "config.json", {"model_type": "llama"})
    cfg: Any = SimpleNamespace(
        checkpoint=None, language=f"{tmp_path}/language", vision=f"{tmp_path}/vision", random_weights=True
    )
    find_parts(cfg)
    for part in ("language", "vision"):
        for name in names:
            (tmp_path / part / name).write_text("")
            with pytest.raises(ConfigError, match=rf"model\.{part}="):
                find_parts(cfg)
            find_parts(SimpleNamespace(**(vars(cfg) | {"random_weights": False})))  # pyright: ignore
            (tmp_path / part / name).unlink()


def test_everything_that_weights_are_read_from_is_compared_with_its_notes(tmp_path: Path) -> None:
    """Each folder once: the parts of a whole model are in its own folder."""
    write_json(tmp_path / "run" / "adapter" / "adapter_config.json", {})
    language, vision, whole = (tmp_path / name for name in ("language", "vision", "whole"))
    nothing: Any = None
    plain: Any = SimpleNamespace(lora=SimpleNamespace(checkpoint=None))
    adapted: Any = SimpleNamespace(lora=SimpleNamespace(checkpoint=str(tmp_path / "run")))
    apart = Parts(language, vision, nothing, nothing, None)
    assert artifacts_of(apart, None, plain) == [language, vision]
    assert artifacts_of(apart, tmp_path / "p", adapted) == [language, vision, tmp_path / "p", tmp_path / "run/adapter"]
    assert artifacts_of(Parts(whole, whole, nothing, nothing, whole), None, plain) == [whole]
    assert artifacts_of(Parts(whole, vision, nothing, nothing, whole), None, plain) == [whole, vision]


@pytest.mark.parametrize(
    ("kind", "merge", "fits"),
    [
        (LlavaConfig, PatchMerge.flat, True), (LlavaConfig, PatchMerge.spatial_unpad, True),
        (LlavaNextConfig, PatchMerge.spatial_unpad, True), (LlavaNextConfig, PatchMerge.flat, False),
        (LlavaNextConfig, PatchMerge.spatial, False), (LlavaOnevisionConfig, PatchMerge.flat, False),
        (LlavaOnevisionConfig, PatchMerge.spatial_unpad, True),
    ],
)  # fmt: skip
def test_tiles_are_joined_as_the_checkpoint_s_were(kind: Any, merge: PatchMerge, fits: bool, tmp_path: Path) -> None:
    """A model of one tile may be trained further with several."""
    tower = CLIPVisionConfig(image_size=42, patch_size=14)
    config = kind(vision_config=tower, vision_feature_layer=-2, vision_feature_select_strategy="full")
    cfg: Any = SimpleNamespace(
        select_layer=-2, select_feature=Feature.full, projector_type="mlp2x_gelu", shuffle_factor=1, patch_merge=merge
    )
    with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match=r"model\.patch_merge"):
        check_selection(config, cfg, tmp_path)
    cfg.projector_type = "linear"
    with pytest.raises(ConfigError, match=r"model\.projector_type=linear"):
        check_selection(config, cfg, tmp_path)


def test_tiles_and_their_sizes_of_a_checkpoint(tmp_path: Path) -> None:
    """Width and height are the other way round in its file."""
    plain, tiled, limited = LlavaConfig(), LlavaNextConfig(), LlavaOnevisionConfig(vision_aspect_ratio="anyres_max_12")
    for config in (tiled, limited):
        config.image_grid_pinpoints = [[28, 56], (84, 28)]
        assert grids_of(config, tmp_path) == [[56, 28], [28, 84]]
        for wrong in ([], [28, 56], [[28, 56], [28]], [[28, 0]], [[28, True]], [[28, 56.0]], [[28, 56, 84]]):
            config.image_grid_pinpoints = wrong
            with pytest.raises(ModelError, match="image_grid_pinpoints"):
                grids_of(config, tmp_path)
    assert grids_of(plain, tmp_path) is max_tiles_of(plain, tmp_path) is max_tiles_of(tiled, tmp_path) is None
    assert max_tiles_of(limited, tmp_path) == 12
    for wrong in ("anyres", "anyres_max_", "anyres_max_9x", "xanyres_max_9"):
        limited.vision_aspect_ratio = wrong
        with pytest.raises(ModelError, match="vision_aspect_ratio"):
            max_tiles_of(limited, tmp_path)
