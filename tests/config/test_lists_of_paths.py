"""Keys that name files of records take a list, typed or in YAML, whatever the names of its files."""

from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from small import Configure

from llava_fsdp.config import Config, load, paths_in
from llava_fsdp.config.command_line import cli
from llava_fsdp.config.keys.data import list_text
from llava_fsdp.config.paths import paths_read
from llava_fsdp.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("a.json", ["a.json"]),
        ("a.json, b.jsonl", ["a.json", "b.jsonl"]),
        ("[a.json,b.jsonl]", ["a.json", "b.jsonl"]),
        ("""[ 'b, c.jsonl',"d'e.json", f.tar ]""", ["b, c.jsonl", "d'e.json", "f.tar"]),
        ("[a.json,]", ["a.json"]),
        ("[]", [""]),
        ("a.json,", ["a.json", ""]),
        ("[*.json, s3://b/k*]", ["*.json", "s3://b/k*"]),
        ("[ab]*.json", ["[ab]*.json"]),
        ("shards/part-[0-9]", ["shards/part-[0-9]"]),
    ],
)
def test_what_a_text_names(text: str, paths: list[str]) -> None:
    assert paths_in(text) == paths


@pytest.mark.parametrize(
    "paths", [["a.json"], ["a b.json", "c,d.json", "e[1].json"], ["o'x", 'q"y'], ["s3://b/a", "*"]]
)
def test_a_list_is_read_back_as_it_was(paths: list[str]) -> None:
    assert paths_in(list_text(paths, "data.path")) == paths


def test_a_list_is_as_good_in_yaml_as_typed(configure: Configure, tmp_path: Path) -> None:
    """In `data.path`, `val.path` and in sources; the keys of missing files have their numbers."""
    (tmp_path / "data").mkdir()
    files = ["a.json", "b, c.jsonl", "s3://bucket/k.jsonl", "d.tar"]
    tree = {"defaults": ["llava_json"], "path": files, "images": "images"}
    (tmp_path / "data" / "mine.yaml").write_text(yaml.safe_dump(tree))
    typed = """[a.json,"b, c.jsonl",s3://bucket/k.jsonl,d.tar]"""
    words = ["val.every=3", "++val.sources.x.path=[e.json,f.jsonl]"]
    from_yaml = compose_words(tmp_path, "data=mine", *words)
    from_words = compose_words(tmp_path, "data=llava_json", "data.images=images", f"data.path={typed}", *words)
    assert from_yaml.data.path is not None and from_words.data.path is not None
    assert paths_in(from_yaml.data.path) == paths_in(from_words.data.path) == files
    assert from_yaml.data.source_names == ["a"] and from_yaml.data.index_folder == Path("a.json.index")
    assert paths_in(from_yaml.val.sources["x"].path) == ["e.json", "f.jsonl"]
    read = paths_read(from_yaml)
    assert (read["data.path[1]"], read["data.path[3]"]) == ("b, c.jsonl", "d.tar") and "data.path[2]" not in read
    assert (read["val.sources.x.path[0]"], read["val.sources.x.path[1]"]) == ("e.json", "f.jsonl")


def compose_words(folder: Path, *words: str) -> Config:
    """The configuration of a training as from a command line with `--config-dir`."""
    found = [f"hydra.searchpath=[file://{folder}]", *map(cli.taken_literally, words)]
    with initialize_config_dir(str(cli.config_dir()), version_base="1.3"):
        return load(Config, compose("train", found))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data.path=[]", r"data.path=\[\]"),
        ("data.path=[a.json,null]", r"data.path\[1\]=None"),
        ("val.path=[a.json,[b.json]]", r"val.path\[1\]="),
        ("++data.sources.a.path=[1]", r"data.sources.a.path\[0\]=1"),
        ("++val.sources.a.path=[x,'']", r"val.sources.a.path\[1\]=''"),
    ],
)
def test_an_item_that_is_no_path_is_named(word: str, said: str, configure: Configure) -> None:
    with pytest.raises(ConfigError, match=said):
        configure(word)
