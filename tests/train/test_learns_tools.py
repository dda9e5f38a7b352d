"""A small model learns from images which tool to call and how, to wait for the result, and to answer with it. With
labels that are found by a search for role markers it does not."""

from pathlib import Path

import pytest
from small import command_config, write_json
from tool_learning import HELD_OUT, RECORDS, Labels, called, measure, train_with, write_examples

from llava_fsdp.chat import main as chat
from llava_fsdp.config import ChatConfig

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.timeout(3600)  # five minutes on an idle core
def test_a_model_learns_to_call_a_tool_with_exact_labels_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run has the same records, seed and steps. A blind guess is right once in twelve calls."""
    data, images = tmp_path / "data", tmp_path / "data" / "images"
    held_out = write_examples(data, RECORDS, HELD_OUT)
    found = {}
    for labels in Labels:
        train_with(labels, data, tmp_path / labels.name)
        found[labels] = measure(tmp_path / labels.name, held_out, images)
    exact = found[Labels.exact]
    assert exact["call"] >= 0.8 and exact["answer"] >= 0.8 and exact["all"] >= 0.75, found
    assert exact["thought"] >= 0.8 and exact["stop"] >= 0.95 and exact["invented"] <= 0.02, found
    for labels in (Labels.between, Labels.behind):
        assert found[labels]["stop"] <= 0.2 and found[labels]["all"] <= 0.2, found
    assert found[Labels.behind]["invented"] >= 0.5, found

    capsys.readouterr()
    own = held_out[0]
    write_json(images / "talk.json", {**own.record, "messages": own.record["messages"][:1]})
    words = (f"model.checkpoint={tmp_path / Labels.exact.name}", f"messages={images / 'talk.json'}")
    chat.chat(command_config(ChatConfig, "chat", *words))
    printed = capsys.readouterr().out
    assert printed.startswith("(thought) A ") and set(called(printed)) == {"name", "arguments"}
