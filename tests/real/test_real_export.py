"""What a training of published weights exports: transformers' own classes read the trained weights and give `chat`'s
answers; peft reads its adapters, with equal logits."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from PIL import Image
from real_parts import PRETRAINED, Theirs
from runs import saved_tensors
from small import conversion, make_config
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    pipeline,
)

from llava_fsdp.chat.assistant import Assistant, Question
from llava_fsdp.config import AUTO, AspectRatio
from llava_fsdp.data.records.record import Turn
from llava_fsdp.export.main import export
from llava_fsdp.export.prove.verify_logits import relative_difference
from llava_fsdp.model.weights.weight_names import ours
from llava_fsdp.train import main as train

MORE = ["global_batch_size=4", "micro_batch_size=4", "max_steps=3", "checkpoint.every=3", "export.enabled=true"]
QUESTIONS = [
    (1, "what color is the shape?"), (0, "What is the capital of France? Answer with one word."),
    (2, "Do they show the same shape?"),
]  # fmt: skip
"""Number of images, and what is asked."""
TOKENS = 48


@pytest.fixture(scope="module")
def run(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of the whole models, exported in bf16, the default."""
    folder = tmp_path_factory.mktemp("run")
    train.train(make_config(parts, dataset, folder, *PRETRAINED, *MORE, "export.verify=true"))
    return folder


@pytest.fixture(scope="module")
def adapted(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of adapters, merged into an export in fp32."""
    folder = tmp_path_factory.mktemp("adapted")
    own = ["model.lora.r=8", "model.lora.alpha=16", "optim.lr=1e-3", "export.dtype=fp32", "export.verify=false"]
    train.train(make_config(parts, dataset, folder, *PRETRAINED, *MORE, *own, stage="finetune_lora"))
    return folder


def test_transformers_reads_the_trained_weights_rounded_once(run: Path, parts: Path) -> None:
    """The language model and the projector from the checkpoint's files; the tower is the published one."""
    read, info = AutoModelForImageTextToText.from_pretrained(run / "export", dtype="auto", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    [checkpoint] = (run / "checkpoints").glob("step-*")
    saved = {name.partition(": ")[2]: tensor for name, tensor in saved_tensors(checkpoint)}
    trained = {name.removeprefix("model."): t for name, t in saved.items() if name.startswith("model.")}
    published = AutoModelForCausalLM.from_pretrained(parts / "language", dtype=torch.float32).model
    tower = dict(AutoModel.from_pretrained(parts / "vision", dtype=torch.float32).named_parameters())
    moved = 0
    for name, tensor in read.named_parameters():
        assert tensor.dtype is torch.bfloat16
        if "vision_tower" in name:
            expected = tower[name.partition("vision_tower.")[2]]
        else:
            expected = trained.pop(ours(name))
        assert torch.equal(tensor[: len(expected)], expected.bfloat16()), name
        if "language_model.layers." in name:
            first = published.get_parameter(name.partition("language_model.")[2])
            moved += not torch.equal(first, expected)
    assert moved == sum("layers." in name for name, _ in published.named_parameters()), "every weight was trained"
    assert not {name for name in trained if "lm_head" not in name}, "every trained weight is in the export"


def images_of(dataset: Path, count: int) -> list[Path]:
    records = json.loads((dataset / "mixed.json").read_text())
    two = next(record["image"] for record in records if isinstance(record.get("image"), list))
    return [dataset / "images" / name for name in two[:count]]


@pytest.mark.parametrize(("count", "asked"), QUESTIONS)
def test_transformers_answers_as_chat_does_and_stops(run: Path, dataset: Path, count: int, asked: str) -> None:
    """`generate` and `pipeline`, greedy, in fp32."""
    images = images_of(dataset, count)
    tags = "<image>\n" * count
    question = Question([Turn("human", f"{tags}{asked}")], list(images), "here")
    assistant = Assistant(str(run), AUTO, AspectRatio.pad)
    assistant.model.float()
    [answer] = assistant.answers([question], TOKENS)
    content: list[dict[str, Any]] = [{"type": "image", "image": Image.open(path).convert("RGB")} for path in images]
    # with several images the line breaks between them are the question's own
    parts = [piece for shown in content for piece in (shown, {"type": "text", "text": "\n"})] if count > 1 else content
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": asked}]}]
    processor = AutoProcessor.from_pretrained(run / "export")
    given = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    model: Any = AutoModelForImageTextToText.from_pretrained(run / "export", dtype=torch.float32)
    written = model.generate(**given, max_new_tokens=TOKENS, do_sample=False)[0, given["input_ids"].shape[1] :]
    write = pipeline("image-text-to-text", model=str(run / "export"), device="cpu", dtype=torch.float32)
    [said] = write(
        text=messages, return_full_text=False, generate_kwargs={"max_new_tokens": TOKENS, "do_sample": False}
    )
    end = processor.tokenizer.eos_token_id
    assert int(written[-1]) == end and len(written) < TOKENS, "the answer ends by itself"
    assert answer == processor.decode(written, skip_special_tokens=True).strip() == said["generated_text"].strip() != ""


@torch.no_grad()
def test_peft_reads_the_adapters(adapted: Path, parts: Path, theirs: dict[str, Theirs], tmp_path: Path) -> None:
    """Over the published language model on text, and over transformers' LLaVA class on every kind of record: the logits
    of the merged export."""
    merged: Any = AutoModelForImageTextToText.from_pretrained(adapted / "export", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(parts / "language", dtype=torch.float32)
    rows = base.config.vocab_size
    text = AutoTokenizer.from_pretrained(parts / "language")("The capital of France is", return_tensors="pt")
    before = base(**text).logits
    beside = peft.PeftModel.from_pretrained(base, adapted / "adapter").eval()(**text).logits
    alone = merged(**text).logits[..., :rows]
    assert relative_difference(beside, alone) < 1e-5 and relative_difference(before, alone) > 1e-3
    folder = export(conversion(adapted / "adapter", tmp_path / "to", "format=peft", "dtype=fp32", "verify=false"))
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    whole = peft.PeftModel.from_pretrained(whole, folder / "adapter").eval()
    for record in [*theirs.values()][:5]:
        given = {"input_ids": record.ids[None], "pixel_values": record.pixels}
        assert relative_difference(whole(**given).logits[..., :rows], merged(**given).logits[..., :rows]) < 1e-5
