"""What machines of one run compare before anything is loaded."""

from dataclasses import fields
from pathlib import Path

import pytest
from small import make_config

from llava_fsdp.config.paths import check_same_settings
from llava_fsdp.runtime.errors import ConfigError

Settings = list[dict[str, str]]


def test_other_arguments_are_named_and_other_places_are_not(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNODES", "2")
    cfg = make_config(parts, dataset, tmp_path, "+val.sources.few={path: /here/a.json, images: /here}")
    sent: Settings = []

    def both(own: Settings, **other: str) -> Settings:
        sent[:] = own
        return [*own, {**own[0], **other}]

    check_same_settings(cfg, both)
    (own,) = sent
    assert (own["optim.lr"], own["NNODES"], own["output_dir"]) == (str(cfg.optim.lr), "2", str(tmp_path))
    dataset_places = {
        f"{part.name}.{own.name}"
        for part in fields(cfg)
        if part.name in ("data", "val")
        for own in fields(getattr(cfg, part.name))
        if own.name in ("path", "images", "root", "index")
    }
    assert len(dataset_places) == 7
    models = {f"model.{key}" for key in ("language", "vision", "checkpoint", "projector", "lora.checkpoint")}
    places = dataset_places | models | {"offload.folder"}
    assert not places & own.keys() and not any("/here" in value for value in own.values())
    assert "model.lora.r" in own and "data.max_length" in own
    with pytest.raises(ConfigError, match=rf"rank 1 has NNODES=3, seed=7, rank 0 has NNODES=2, seed={cfg.seed}: start"):
        check_same_settings(cfg, lambda own: both(own, seed="7", NNODES="3"))
