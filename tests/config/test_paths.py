"""Paths that a training reads, and output folders among them that are refused."""

from pathlib import Path
from typing import Any, Protocol

import pytest
from test_config_bounds import training, with_values

from llava_fsdp.config import Config, HeldOutConfig, LoraConfig, SourceConfig
from llava_fsdp.config.paths import check_paths, paths_read
from llava_fsdp.runtime.errors import ConfigError

PARTS = {"model.language": "mine", "model.vision": "./tower"}


class Make(Protocol):
    def __call__(self, values: dict[str, Any] | None = None) -> Config: ...


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes configurations in a folder that has records, images, the two parts of a model, and a run with adapters."""
    monkeypatch.chdir(tmp_path)
    for name in ("images/few", "mine", "tower", "whole", "records", "run/adapter", "old/checkpoints/step-000003"):
        Path(name).mkdir(parents=True)
    for name in ("a.json", "b.json", "held.json"):
        Path(name).write_text("[]")
    keys = {"data.source": "llava_json", "data.path": "a.json", "data.images": "images", "output_dir": "out"}
    base = with_values(training(), {**keys, **PARTS, "model.projector": "auto"})
    return lambda values=None: with_values(base, values or {})


def read(cfg: Config) -> dict[str, str]:
    return {key: name for key, name in paths_read(cfg).items() if key not in PARTS}


def test_every_path_that_is_read_has_its_key(make: Make) -> None:
    records = {"data.path": "a.json", "data.images": "images"}
    assert paths_read(make()) == records | PARTS
    assert read(make({"data.source": "shapes"})) == {}
    assert read(make({"val.path": "held.json", "val.images": "elsewhere"})) == records, "nothing is validated"
    held = {"val.path": "held.json", "val.images": "elsewhere"}
    assert read(make({"val.path": "held.json", "val.images": "elsewhere", "val.every": 1})) == records | held
    several = make({"data.path": "a.json, b.json"})
    assert read(several) == {"data.path[0]": "a.json", "data.path[1]": "b.json", "data.images": "images"}
    assert read(make({"data.path": "records/*.json"}))["data.path"] == "records"
    two = {"one": SourceConfig(path="a.json"), "two": SourceConfig(path="b.json", images="images/few")}
    three = {"three": HeldOutConfig(path="held.json", images="images/few")}
    sources = make({"data.path": None, "data.sources": two, "val.every": 1, "val.sources": three})
    assert read(sources) == {
        "data.images": "images", "data.sources.one.path": "a.json", "data.sources.two.path": "b.json",
        "data.sources.two.images": "images/few", "val.sources.three.path": "held.json",
        "val.sources.three.images": "images/few",
    }  # fmt: skip
    assert read(make({"data.path": "s3://b/a.json,b.json", "data.images": "s3://b/i"})) == {"data.path": "b.json"}
    whole = paths_read(make({"model.checkpoint": "whole"}))
    assert whole == records | {"model.checkpoint": "whole"}, "it has the parts"
    assert read(make({"model.projector": "p.bin", "checkpoint.resume": "old/checkpoints/step-000003"})) == records | {
        "model.projector": "p.bin", "checkpoint.resume": "old/checkpoints/step-000003",
    }  # fmt: skip
    for value in ("auto", "random"):
        assert "model.projector" not in read(make({"model.projector": value}))
    for value in ("auto", "never"):
        assert "checkpoint.resume" not in read(make({"checkpoint.resume": value}))
    on_hub = make({"model.language": "some/model", "model.vision": "package:tiny-clip"})
    assert paths_read(on_hub) == records, "names on the hub and in the package are no paths"
    assert paths_read(make({"model.vision": "/nowhere/tower"}))["model.vision"] == "/nowhere/tower"


def test_a_run_writes_into_no_folder_that_it_reads(make: Make) -> None:
    """It may write below the folder of the images, and continue from a checkpoint of its own."""
    resumed = {"checkpoint.resume": "old/checkpoints/step-000003"}
    pattern = {"data.path": "records/*.json"}
    for good in ({"output_dir": "images/out"}, {"output_dir": "old", **resumed}, {"output_dir": "run"}, pattern):
        check_paths(make(good))
    adapters = {"model.lora": LoraConfig(enabled=True, checkpoint="run/adapter")}
    check_paths(make(adapters))
    for bad in (
        {"output_dir": "images"}, {"output_dir": "mine"}, {"output_dir": "mine/run"},
        {"output_dir": "tower/../mine/a/b"}, {**pattern, "output_dir": "records/out"},
        {**adapters, "output_dir": "run"}, {**adapters, "output_dir": "run/adapter"},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="output_dir="):
            check_paths(make(bad))
    check_paths(make({"data.path": "gone.json"}))
    with pytest.raises(ConfigError, match=r"2 paths do not exist: data\.path=gone\.json, data\.images=/nowhere;"):
        check_paths(make({"data.path": "gone.json", "data.images": "/nowhere"}))
