"""The model card of an exported folder, and pushing the folder to a hub on this machine."""

import fnmatch
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import yaml
from fake_hub import TOKEN
from fake_model_hub import FakeModelHub, model_hub
from families import write_family
from gguf_models import write_model
from PIL import Image
from reference import EXPORTED
from small import command_config, conversion, make_config

from llava_fsdp.chat.assistant import Assistant
from llava_fsdp.chat.open_assistant import open_assistant
from llava_fsdp.config import ConversionConfig, EvaluateConfig
from llava_fsdp.data.text.conversation import asking
from llava_fsdp.data.text.tokens.constants import IMAGE_ID
from llava_fsdp.evaluate.main import evaluate
from llava_fsdp.export.card.model_card import PLACE, WRITTEN, model_card
from llava_fsdp.export.main import export
from llava_fsdp.export.push import check_address, public
from llava_fsdp.model.sources.pretrained import resolve
from llava_fsdp.runtime.errors import CheckpointError, ConfigError, DamagedModel, HubError, ModelError
from llava_fsdp.runtime.files.provenance import check_folder, read_notes
from llava_fsdp.runtime.files.scores_file import read_scores
from llava_fsdp.train import main as train

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
NAME = "user/mine"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModelHub]:
    with model_hub(monkeypatch) as made:
        yield made


@pytest.fixture(scope="module")
def run(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose export was evaluated."""
    folder = tmp_path_factory.mktemp("secret_project") / "run"
    train.train(make_config(parts, dataset, folder, "max_steps=3", "data.template=v1", *EXPORTED))
    asked = ["data.source=llava_json", f"data.path={dataset / 'captions.json'}", f"data.images={dataset / 'images'}"]
    evaluate(command_config(EvaluateConfig, "evaluate", f"model.checkpoint={folder}", *asked, "max_new_tokens=3"))
    return folder


def push(source: Path, *overrides: str) -> Path:
    return export(command_config(ConversionConfig, "export", f"source={source}", f"push={NAME}", *overrides))


def head(text: str) -> dict[str, object]:
    """The metadata of a model card."""
    return yaml.safe_load(text.split("---\n")[1])


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_a_runs_export_is_pushed_as_it_is(run: Path, hub: FakeModelHub, tmp_path: Path) -> None:
    push(run)
    assert hub.private == {NAME: True} and len(hub.commits) == 1
    got = hub.download(NAME, tmp_path / "got")
    check_folder(got)
    for file in (run / "export").rglob("*"):
        if file.is_file() and file.name not in ("README.md", "llava_fsdp.json"):
            assert (got / file.relative_to(run / "export")).read_bytes() == file.read_bytes()


def test_the_card_has_what_the_run_reached(run: Path, hub: FakeModelHub, tmp_path: Path) -> None:
    push(run)
    card = (hub.download(NAME, tmp_path / "got") / "README.md").read_text()
    found = head(card)
    scores = json.loads((run / "results.json").read_text())["evaluations"]
    assert found["library_name"] == "transformers" and found["pipeline_tag"] == "image-text-to-text"
    assert found["model-index"][0]["results"][0]["metrics"][0]["value"] == scores[0]["scores"]["accuracy"]  # type: ignore[index]
    assert (
        f"| conversations | captions.json | {scores[0]['questions']} | accuracy {scores[0]['scores']['accuracy']:.1%}"
        in card
    )
    assert "3 steps" in card and NAME in card and PLACE not in card and "captions.json" in card


def test_scores_of_another_step_are_left_out(run: Path, tmp_path: Path) -> None:
    folder = run / "export"
    notes, (score,) = read_notes(folder), read_scores(run)
    assert "## Scores" in model_card(folder, notes, NAME, [score])
    assert "## Scores" not in model_card(folder, notes, NAME, [{**score, "step": 2}, {**score, "run": "other"}])


def test_nothing_of_this_machine_is_pushed(run: Path, hub: FakeModelHub, parts: Path, dataset: Path) -> None:
    push(run)
    needles = [str(run), str(run.parent), run.parent.name, str(parts), str(parts.parent), str(dataset), TOKEN]
    needles += [
        f"{Path.home()}/",
        *(name for name in (socket.gethostname(), os.environ.get("USER", "")) if len(name) > 5),
    ]
    for path, content in hub.models[NAME]["main"].items():
        for needle in needles:
            assert needle.encode() not in content, (path, needle)


def test_the_cards_code_asks_as_chat(
    run: Path, hub: FakeModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(run)
    got = hub.download(NAME, tmp_path / "got")
    monkeypatch.chdir(tmp_path)
    Image.new("RGBA", (30, 20), (255, 0, 0, 90)).save("image.png")  # whose transparency counts
    (code,) = blocks((got / "README.md").read_text(), "python")
    names: dict[str, Any] = {}
    exec(compile(code.replace(NAME, str(got)), "card", "exec"), names)
    assert len(names["made"]) > 0
    assistant = open_assistant(str(run))
    image = assistant.load_image(tmp_path / "image.png", "the image")
    assert isinstance(assistant, Assistant)
    ids = assistant.encode(asking(None, "<image>\nWhat is this?"), [image], "the question")
    theirs = names["inputs"]["input_ids"][0].numpy()
    np.testing.assert_array_equal(theirs, np.where(ids == IMAGE_ID, names["model"].config.image_token_id, ids))
    _, ours = assistant.to_device(ids[None], [image])
    torch.testing.assert_close(names["inputs"]["pixel_values"], ours["tiles"], check_dtype=False)


def test_the_code_in_the_card_of_a_whole_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_family("deepseek_vl", tmp_path / "source")
    (source / "README.md").write_text("---\nlicense: apache-2.0\nlicense_link: LICENSE\n---\nthe base's card\n")
    made = export(conversion(source, tmp_path / "made"))
    card = (made / "README.md").read_text()
    assert head(card)["license"] == "apache-2.0" and "the base's card" not in card
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (56, 56), "red").save("image.png")
    (code,) = blocks(card, "python")
    exec(compile(code.replace(PLACE, str(made)), "card", "exec"), {})


@pytest.mark.parametrize("form", ["llava", "projector", "gguf"])
def test_each_kind_has_a_card(form: str, tmp_path: Path, run: Path) -> None:
    if form == "gguf":
        source, keys = write_model(tmp_path / "parts", "qwen3")
        made = export(conversion(source, tmp_path / "made", "format=gguf", "verify=false", *keys))
    else:
        made = export(conversion(run, tmp_path / "made", f"format={form}", "vision=org/tower"))
    card = (made / "README.md").read_text()
    assert WRITTEN in card and head(card)["tags"] and "## How to use it" in card


def test_adapters_have_cards_whose_code_puts_them_on_the_base(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    keys = [
        "max_steps=2",
        "optim.lr=0.1",
        "data.template=v1",
        "model.lora.enabled=true",
        "model.train=[projector,language]",
    ]
    train.train(make_config(parts, dataset, run, *keys, *EXPORTED))
    adapters = head((run / "adapter" / "README.md").read_text())
    assert adapters["library_name"] == "peft" and "base_model" not in adapters, "its base is a folder of this machine"
    made = export(conversion(run, tmp_path / "made", "format=peft"))
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (30, 20), "red").save("image.png")
    (code,) = blocks((made / "README.md").read_text(), "python")
    found: dict[str, Any] = {}
    exec(compile(code.replace(PLACE, str(made)), "card", "exec"), found)
    assert found["model"].active_adapters() == ["default"]


def test_an_interrupted_push_goes_on(run: Path, hub: FakeModelHub) -> None:
    hub.refuse_after = 1
    with pytest.raises(HubError, match="to push it again"):
        push(run)
    assert not hub.models[NAME]["main"], "a part of the model is on the hub"
    first, hub.refuse_after = hub.sent[0], 1 << 30
    push(run)
    assert hub.sent.count(first) == 1 and hub.models[NAME]["main"].keys() >= {"README.md", "model.safetensors"}


def test_a_push_after_a_conversion(run: Path, hub: FakeModelHub, tmp_path: Path) -> None:
    push(run, f"to={tmp_path / 'bf16'}", "dtype=bf16", "push_private=false")
    assert hub.private == {NAME: False}
    assert (tmp_path / "bf16" / "model.safetensors").read_bytes() == hub.models[NAME]["main"]["model.safetensors"]


def test_a_branch_is_made(run: Path, hub: FakeModelHub) -> None:
    export(command_config(ConversionConfig, "export", f"source={run / 'export'}", f"push={NAME}@v2"))
    assert not hub.models[NAME]["main"] and "model.safetensors" in hub.models[NAME]["v2"]


def test_stale_shards_are_removed(run: Path, hub: FakeModelHub) -> None:
    push(run)
    hub.models[NAME]["main"]["model-00001-of-00002.safetensors"] = b"old"
    hub.models[NAME]["main"]["notes.txt"] = b"the user's"
    push(run)
    assert "notes.txt" in hub.models[NAME]["main"]
    assert "model-00001-of-00002.safetensors" not in hub.models[NAME]["main"]


def test_files_that_an_export_no_longer_has_are_removed(run: Path, hub: FakeModelHub, tmp_path: Path) -> None:
    push(run, f"to={tmp_path / 'llava'}", "format=llava", "vision=org/tower")
    assert "vision_tower/config.json" in hub.models[NAME]["main"]
    push(run)
    assert "vision_tower/config.json" not in hub.models[NAME]["main"]


def test_a_pushed_model_is_loaded_by_its_name(
    tmp_path: Path, hub: FakeModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its LICENSE is not in the first download."""
    source = write_family("deepseek_vl", tmp_path / "source")
    (source / "LICENSE").write_text("free")
    push(source, f"to={tmp_path / 'made'}")

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        for path, content in hub.models[name]["main"].items():
            if any(fnmatch.fnmatch(path, pattern) for pattern in allow_patterns):
                (tmp_path / "cache" / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "cache" / path).write_bytes(content)
        return str(tmp_path / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.chdir(tmp_path)
    assert resolve(NAME, "model.checkpoint") == tmp_path / "cache"


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_another_model_is_not_overwritten(file: str, run: Path, hub: FakeModelHub) -> None:
    hub.models[NAME] = {"main": {file: b"other"}}
    with pytest.raises(ConfigError, match="another model"):
        push(run)
    assert hub.models[NAME]["main"] == {file: b"other"}


def test_the_users_own_card_is_kept(run: Path, hub: FakeModelHub, tmp_path: Path) -> None:
    made = export(conversion(run, tmp_path / "made"))
    (made / "README.md").write_text("# mine\n")
    push(made)
    assert hub.models[NAME]["main"]["README.md"] == b"# mine\n"


def spoil_card(made: Path) -> None:
    (made / "README.md").write_text(f"see {Path.home()}/notes.txt")


def spoil_with_token(made: Path) -> None:
    (made / "README.md").write_text(f"use {TOKEN}")


def spoil_with_variable(made: Path) -> None:
    (made / "README.md").write_text("the password is correct horse battery")


def spoil_weights(made: Path) -> None:
    with (made / "model.safetensors").open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"\1")


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (spoil_card, ModelError), (spoil_with_token, ModelError), (spoil_with_variable, ModelError),
        (spoil_weights, DamagedModel),
    ],
)  # fmt: skip
def test_what_must_not_be_pushed_is_not(
    spoil: Callable[[Path], None], error: type[Exception], run: Path, hub: FakeModelHub, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("MY_PASSWORD", "correct horse battery")
    made = export(conversion(run, tmp_path / "made"))
    spoil(made)
    with pytest.raises(error):
        push(made)
    assert not hub.models


def test_a_refused_user_is_told_before_anything_is_written(
    run: Path, hub: FakeModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match="HF_TOKEN"):
        push(run, f"to={tmp_path / 'made'}")
    assert not list(tmp_path.iterdir())


def test_an_unreachable_hub(run: Path, hub: FakeModelHub, tmp_path: Path) -> None:
    hub.close()
    with pytest.raises(HubError):
        push(run, f"to={tmp_path / 'made'}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ["mine", "user/mine/deep", "user/mine@", "https://hub/user/mine", ""])
def test_a_wrong_place_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="USER/NAME"):
        check_address(address)


def test_a_folder_of_another_program_is_refused(hub: FakeModelHub, parts: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("to=FOLDER")):
        push(parts / "language")


@pytest.mark.parametrize(
    ("key", "value", "bases", "shown"),
    [
        ("language", "/data/models/small", None, "small"),
        ("vision", "org/tower", None, "org/tower"),
        ("vision", "org/tower", ["org/tower"], "org/tower"),
        ("vision", "secret/tower", ["tower"], "tower"),
        ("checkpoint", "../secret/llava", None, "llava"),
        ("deep", ["/data/x"], None, ["x"]),
        ("template", "a/b", None, "a/b"),
        ("step", 3, None, 3),
    ],
)
def test_paths_become_names(key: str, value: Any, bases: list[str] | None, shown: Any) -> None:
    assert public(value, key, bases) == shown


@pytest.mark.parametrize("key", ["format=gguf", "dtype=bf16", "which=best", "template=v1"])
def test_a_conversion_needs_a_folder(key: str, run: Path, hub: FakeModelHub) -> None:
    with pytest.raises(ConfigError, match="to=FOLDER"):
        push(run, key)
    assert not hub.models


def test_a_path_of_a_vision_tower_stops_the_push(run: Path, hub: FakeModelHub, tmp_path: Path) -> None:
    """format=llava writes the folder of the vision tower into config.json."""
    with pytest.raises(ModelError, match=r"config\.json"):
        push(run, f"to={tmp_path / 'made'}", "format=llava")
    assert not hub.models


def test_a_folder_whose_files_are_not_listed_is_refused(run: Path, hub: FakeModelHub, tmp_path: Path) -> None:
    made = export(conversion(run, tmp_path / "made"))
    (made / "llava_fsdp.json").write_text("{}")
    with pytest.raises(ModelError, match="accept"):
        push(made)
    assert not hub.models


def test_a_run_without_export_is_named(hub: FakeModelHub, parts: Path, dataset: Path, tmp_path: Path) -> None:
    train.train(make_config(parts, dataset, tmp_path / "run", "max_steps=1", "export.enabled=false"))
    with pytest.raises(CheckpointError):
        push(tmp_path / "run")


@pytest.mark.parametrize(("role", "place"), [("read", NAME), ("write", "other/mine")])
def test_rights_are_asked_first(
    role: str, place: str, run: Path, hub: FakeModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = {"name": "user", "orgs": [], "auth": {"accessToken": {"role": role}}}
    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", lambda *_: user)
    with pytest.raises(ConfigError):
        export(conversion(run, tmp_path / "made", f"push={place}"))
    assert not list(tmp_path.iterdir())
