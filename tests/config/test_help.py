"""What `--help` prints, key by key."""

from dataclasses import dataclass, field

import pytest
from omegaconf import OmegaConf

from llava_fsdp.config import Config, PrepareConfig, TooLong
from llava_fsdp.config.command_line.describe import takes
from llava_fsdp.config.command_line.help import (
    about,
    asked_help,
    choices_of,
    first_sentence,
    groups_of,
    meanings,
    render_help,
    shown,
    table,
)


@pytest.mark.parametrize(
    ("words", "group"),
    [
        (["--help", "data"], "data"), (["stage=pretrain", "-h", "model.lora"], "model.lora"), (["--help"], ""),
        (["--help", "seed=1"], ""), (["--help", "--cfg"], ""), (["seed=1", "data"], None), ([], None),
    ],
)  # fmt: skip
def test_what_help_is_asked_for(words: list[str], group: str | None) -> None:
    assert asked_help(words) == group


@dataclass
class Inner:
    """Keys of the inside, in
    two lines."""

    width: int = 3
    """How wide it is, as 1.5 or 2. More of it."""


@dataclass
class Base:
    first: str | None = None
    """What comes first."""
    second: TooLong = TooLong.skip


@dataclass
class Whole(Base):
    third: float = 0.5
    """A third."""
    inner: Inner = field(default_factory=Inner)
    """A group."""


def test_meanings_are_the_texts_behind_the_keys() -> None:
    """Of a class and of those that it extends; a key without a text has none."""
    assert meanings(Whole) == {"first": "What comes first.", "third": "A third.", "inner": "A group."}
    assert first_sentence(meanings(Inner)["width"]) == "How wide it is, as 1.5 or 2"
    assert groups_of(Whole) == {"inner": Inner}
    assert groups_of(Config).keys() > {"model", "model.lora", "data", "precision.scaler"}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def test_a_row_has_name_value_meaning_and_type() -> None:
    node = OmegaConf.create({"first": "x" * 99, "second": "skip", "third": "${nowhere.at.all}", "inner": {"width": 4}})
    rows = [" ".join(line.split()) for line in table("", Whole, node)]
    assert len(rows) == 3 and rows[0] == f"first=... What comes first ({takes(Whole, 'first')})"
    assert rows[1] == f"second=skip ({takes(Whole, 'second')})" and rows[2] == "third=? A third (a number)"
    (row,) = table("inner", Inner, node)
    assert " ".join(row.split()) == "inner.width=4 How wide it is, as 1.5 or 2 (a whole number)"
    assert shown(None, "width") == "null"
    assert about("inner", Inner) == ["Keys of the inside, in two lines."] and about("x", Base) == [""]


def test_sets_of_values_are_the_files_of_a_group() -> None:
    lines = [" ".join(line.split()) for line in choices_of(None, "sharding")]
    assert lines[1] == "sharding= auto | hybrid | hybrid2 | zero0 | zero1 | zero2 | zero3" and lines[-1] == ""
    every = "\n".join(choices_of(Config))
    assert "  stage=" in every and "  precision=" in every and choices_of(None, "seed") == []


def test_help_of_a_command_has_its_own_example() -> None:
    lines = render_help("prepare", PrepareConfig, []).splitlines()
    assert lines[0] == "usage: llava-fsdp prepare key=value ..."
    assert lines[1].startswith("example: llava-fsdp prepare data=llava_json ")
    assert any(line.lstrip().startswith("format=") for line in lines)
    assert {"data", "model.lora", "prepare"} <= set(
        " ".join(lines[lines.index("groups of keys, each shown by --help GROUP:") + 1 :]).replace(",", " ").split()
    )
