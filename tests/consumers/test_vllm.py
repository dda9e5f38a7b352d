"""Exports in vLLM: the prompt's token ids, its log-probabilities and the greedy answer of transformers, for text and
images."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import transformers_reader
import vllm_reader
import vllm_server_reader
from consumer_models import MODELS, TOKENS, WHOLE_MODELS, questions, train_family, train_model, write_images
from small import conversion

from llava_fsdp.export.main import export

pytestmark = pytest.mark.consumers
EQUAL, RESIZED = 2e-4, 0.1
"""Largest difference of a log-probability: of a prompt without resized images, and of one with them, which vLLM resizes
with torchvision and training with Pillow."""


@pytest.fixture(scope="session")
def python() -> Path:
    """The Python of the environment with vLLM, which `launch/test.sh --consumers` makes."""
    found = Path(os.environ.get("LLAVA_FSDP_VLLM", ".venv-vllm")) / "bin" / "python"
    if not found.is_file():
        pytest.skip(f"no environment with vLLM: {found} is missing (launch/test.sh --consumers)")
    return found


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Trains a model once."""
    made: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in made:
            made[name] = train_model(name, tmp_path_factory.mktemp("run"))
        return made[name]

    return run


def ask(python: Path, program: Any, folder: Path, images: dict[str, list[Path]], *more: Path) -> dict[str, Any]:
    """What a program of tests/support says in the environment with vLLM."""
    with TemporaryDirectory() as made:
        asked, to = Path(made) / "asked.json", Path(made) / "answers.json"
        asked.write_text(questions(images))
        command = [str(python.absolute()), program.__file__, str(folder), str(asked), str(to), *map(str, more)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(to.read_text())


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    compared = []
    for name, ours in expected.items():
        theirs, bound = found[name], EQUAL if name in ("text", "an image of the tower's size") else RESIZED
        assert theirs["ids"] == ours["ids"], name
        far = max(abs(a - b) for a, b in zip(theirs["logs"], ours["logs"], strict=True))
        print(f"{name}: log-probabilities within {far:.2g}, {len(ours['ids'])} tokens, margin {ours['margin']:.2g}")
        assert far <= bound, name
        if ours["margin"] > 2 * far:
            compared.append(name)
            assert theirs["answer"] == ours["answer"] and len(ours["answer"]) == TOKENS, name
    assert 2 * len(compared) > len(expected), (
        "of most questions all tokens are compared, and only near ties are left out"
    )


@pytest.mark.parametrize("name", MODELS)
def test_answers_as_transformers(
    name: str, runs: Callable[[str], Path], python: Path, images: dict[str, list[Path]]
) -> None:
    """The processor of LLaVA-OneVision needs torchvision, so transformers runs in vLLM's environment, too."""
    folder = runs(name) / "export"
    assert_same(ask(python, vllm_reader, folder, images), ask(python, transformers_reader, folder, images))


@pytest.mark.any
@pytest.mark.parametrize("name", WHOLE_MODELS)
def test_whole_models_answer_as_transformers(
    name: str, python: Path, images: dict[str, list[Path]], tmp_path: Path
) -> None:
    try:
        folder = train_family(name, tmp_path) / "export"
    except ImportError as error:
        pytest.skip(f"needs torchvision: {error.msg.splitlines()[0]}")
    theirs, ours = ask(python, vllm_reader, folder, images), ask(python, transformers_reader, folder, images)
    if name == "gemma3":  # on a CPU, tokens of an image do not attend to later ones of the same image in vLLM
        assert all(theirs[case]["ids"] == ours[case]["ids"] for case in ours)
        theirs, ours = ({"text": answers["text"]} for answers in (theirs, ours))
    assert_same(theirs, ours)


def test_its_openai_server_answers_the_same(
    runs: Callable[[str], Path], python: Path, images: dict[str, list[Path]]
) -> None:
    folder = runs(next(iter(MODELS))) / "export"
    expected = ask(python, vllm_reader, folder, images)
    for name, said in ask(python, vllm_server_reader, folder, images).items():
        assert said == {key: expected[name][key] for key in ("ids", "answer")}, name


def test_adapters_by_its_own_loader(
    runs: Callable[[str], Path], python: Path, images: dict[str, list[Path]], tmp_path: Path
) -> None:
    """The folder of format=peft answers as the merged export, and its base otherwise. The projector in it is the
    trained one."""
    run = runs("adapters, Llama and CLIP, own template")
    made = export(conversion(run, tmp_path / "served", "format=peft"))
    expected = ask(python, transformers_reader, run / "export", images)
    assert_same(ask(python, vllm_reader, made, images, made / "adapter"), expected)
    base = ask(python, vllm_reader, made, images)
    assert any(base[name]["logs"] != pytest.approx(ours["logs"], abs=EQUAL) for name, ours in expected.items())
