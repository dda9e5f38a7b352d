"""transformers' own class and processor as the peer of a training of a whole model: one sample at a time."""

import copy
import functools
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from families import FAMILIES, TEMPLATES, write_family
from loaders import agreed_steps
from PIL import Image
from small import config_of, write_json
from torch.distributed.tensor import DTensor
from transformers.video_utils import load_video

from llava_fsdp.config import Config
from llava_fsdp.data.batching.batch import MicroBatch
from llava_fsdp.train.state import TrainState

TAG, VIDEO_TAG = "<image>", "<video>"
IGNORE = -100
ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
NO_CHAT = ("paligemma", "got_ocr2")
"""Families whose processors take no conversation: they need an image, at one place, and no more than one."""
CHAT = tuple(name for name in FAMILIES if name not in NO_CHAT)
LLAVA = ("llava", "llava_next", "llava_onevision")
"""Families that are trained as LLaVA, without transformers' processor."""
WHOLE = tuple(name for name in CHAT if name not in LLAVA)
"""Families that are trained as a whole: by their class and processor."""
PADDED = {
    "qwen3_5": "linear attention", "lfm2_vl": "convolutions", "llama4": "chunked attention",
    "minimax_m3_vl": "sparse attention",
}  # fmt: skip
"""Families whose rows are padded, because their layers cannot keep the samples of a packed row apart: {name: why}."""
SIZES = [(40, 28), (24, 56), (32, 32), (61, 17), (30, 30), (20, 20), (45, 90), (7, 9)]
"""(width, height) of the images that `write_images` writes."""
PIECES = [
    "how many dogs", "the quick brown fox", "jumps", "over", "two lazy dogs", "A red square.", "blue?", "12.5 %", "été",
    "日本", "🙂", "a\nb", "x  y", "{{ m }}", "<b>", "it's", "-", "\n\n", "...", "Ω≤3",
]  # fmt: skip


def write_images(folder: Path) -> list[str]:
    """Write noise of the SIZES, in each process the same; return the names of the files."""
    folder.mkdir(parents=True)
    dice, names = np.random.default_rng(0), [f"{number}.png" for number in range(len(SIZES))]
    for name, (width, height) in zip(names, SIZES, strict=True):
        Image.fromarray(dice.integers(256, size=(height, width, 3), dtype=np.uint8)).save(folder / name)
    return names


def conversation(number: int, turns: Sequence[str], images: Sequence[str] = (), system: str = "") -> dict[str, Any]:
    """A record in LLaVA's form: questions and answers in turns."""
    spoken = [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(turns)]
    first = [{"from": "system", "value": system}] if system else []
    return {"id": f"r{number}", **({"image": list(images)} if images else {}), "conversations": [*first, *spoken]}


def few_records(names: Sequence[str]) -> list[dict[str, Any]]:
    """Text alone, one image, several images of several sizes in two questions, an image behind a text."""
    question = f"first {TAG} and second {TAG}, which?"
    return [
        conversation(0, ["how many dogs are there?", "two dogs", "and the fox?", "it jumps"]),
        conversation(1, [f"{TAG}\nWhat is in this image?", "A red square."], names[:1]),
        conversation(2, [question, "the second one", f"and {TAG}?", "a quick brown fox"], names[1:4]),
        conversation(3, [f"jumps over {TAG}", "the lazy dog"], names[4:5]),
    ]


def eight_records(names: Sequence[str]) -> list[dict[str, Any]]:
    """The few, and four more with the same images and other texts."""
    question = f"which of {TAG} and {TAG}"
    return [
        *few_records(names),
        conversation(4, ["is the dog lazy?", "yes, very"]),
        conversation(5, [f"over {TAG}\nand", "it's blue"], names[4:5]),
        conversation(
            6, [question, "none", f"or {TAG}", "the first and the second"], names[1:4], "Answer in few words."
        ),
        conversation(7, [f"{TAG}\nhow many?", "two", "and now?", "12.5 %"], names[:1]),
    ]


def random_records(names: Sequence[str], count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations of 1 to 4 exchanges with 0 to 3 images anywhere in the questions, and some with a system turn."""
    dice = random.Random(seed)
    made = []
    for number in range(count):
        turns = [" ".join(dice.choices(PIECES, k=dice.randrange(1, 9))) for _ in range(2 * dice.randrange(1, 5))]
        turns = [text.strip() or "yes" for text in turns]
        images = dice.choices(names, k=dice.choice([0, 1, 1, 2, 3]))
        for _ in images:
            at = 2 * dice.randrange(len(turns) // 2)
            words = turns[at].split(" ")
            words.insert(dice.randrange(len(words) + 1), TAG + dice.choice(["", "\n"]))
            turns[at] = " ".join(words)
        made.append(conversation(number, turns, images, "Answer in few words." if dice.random() < 0.2 else ""))
    return made


@dataclass(frozen=True)
class WholeModel:
    """A family's folder, and records with their images in a folder."""

    name: str
    folder: Path
    images: Path

    @functools.cached_property
    def processor(self) -> Any:
        """transformers' own. It reads videos with transformers' reader for PyAV: its default is another library.

        For families that are trained as LLaVA it resizes images with Pillow, as training does, also where torchvision
        is installed.
        """
        processor = transformers.AutoProcessor.from_pretrained(self.folder)
        if self.name in LLAVA:
            processor.image_processor = transformers.AutoImageProcessor.from_pretrained(self.folder, backend="pil")
        if hasattr(processor, "video_processor"):
            processor.video_processor.fetch_videos = fetch_videos
        return processor

    @property
    def end(self) -> int:
        """Id of the token that ends an answer."""
        return self.processor.tokenizer.convert_tokens_to_ids(TEMPLATES[FAMILIES[self.name].template].end)

    def peer(self) -> Any:
        """transformers' own class, in training mode, without dropout; batch normalization has stored statistics."""
        auto = transformers.AutoModelForImageTextToText
        made = auto.from_pretrained(self.folder, dtype=torch.float32).train()
        for module in made.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                module.eval()
        return made

    def records(self, kind: str) -> list[dict[str, Any]]:
        return json.loads((self.images.parent / f"{kind}.json").read_text())

    def config(self, output: Path, *overrides: str, records: str = "few", stage: str = "finetune_task") -> Config:
        """A training in fp32 of all parts on the records of a kind, all in one micro-batch."""
        count = len(self.records(records))
        values = [
            f"stage={stage}",
            f"model.checkpoint={self.folder}",
            "data.template=auto",
            "data=llava_json",
            f"data.path={self.images.parent / f'{records}.json'}",
            f"data.images={self.images}",
            "data.workers=0",
            "data.max_length=4000",
            f"output_dir={output}",
            "precision=fp32",
            "activation_checkpointing=none",
            "compile=false",
            "export.enabled=false",
            f"global_batch_size={count}",
            f"micro_batch_size={count}",
            "max_steps=1",
        ]
        parts = [] if "lora" in stage else ["model.train=[vision,projector,language]"]
        return config_of([*values, *parts, *overrides])


def write_whole_model(name: str, folder: Path) -> WholeModel:
    images = write_images(folder / "images")
    few = few_records(images)
    write_json(folder / "few.json", few)
    write_json(folder / "pair.json", few[:2])
    write_json(folder / "eight.json", eight_records(images))
    write_json(folder / "random.json", random_records(images, 300))
    return WholeModel(name, write_family(name, folder / "model"), folder / "images")


@dataclass(frozen=True)
class Example:
    """A record as transformers' processor makes it."""

    inputs: dict[str, torch.Tensor]
    """Arguments of the model's class, for one sample."""
    labels: torch.Tensor
    """int64 [length]: the ids of the answers and of the token that ends each, elsewhere IGNORE."""

    @property
    def ids(self) -> torch.Tensor:
        return self.inputs["input_ids"][0]


def messages_of(record: dict[str, Any], images: Path) -> list[dict[str, Any]]:
    """A record as messages with parts. A line break beside an image tag is no text: LLaVA's records write it there."""
    files, videos = iter(record.get("image", [])), iter(record.get("video", []))

    def parts(text: str) -> Iterator[dict[str, Any]]:
        tags, pieces = re.findall(f"{TAG}|{VIDEO_TAG}", text), re.split(f"{TAG}|{VIDEO_TAG}", text)
        for number, piece in enumerate(pieces):
            if number and tags[number - 1] == TAG:
                yield {"type": "image", "image": Image.open(images / next(files)).convert("RGB")}
            elif number:
                yield {"type": "video", "path": str(images / next(videos))}
            piece = piece.removeprefix("\n") if number else piece
            piece = piece.removesuffix("\n") if number + 1 < len(pieces) else piece
            if piece:
                yield {"type": "text", "text": piece}

    return [{"role": ROLES[t["from"]], "content": list(parts(t["value"]))} for t in record["conversations"]]


def fetch_videos(videos: Any, sample_indices_fn: Any = None) -> Any:
    """What a video processor's `fetch_videos` returns, with PyAV instead of torchcodec: the sampled frames, and the
    file's metadata."""
    if isinstance(videos, list):
        return list(zip(*[fetch_videos(own, sample_indices_fn) for own in videos], strict=True))
    frames, metadata = load_video(videos, backend="pyav")
    if sample_indices_fn is not None:
        metadata.frames_indices = np.asarray(sample_indices_fn(metadata=metadata))
    return frames[metadata.frames_indices], metadata


def example_of(model: WholeModel, record: dict[str, Any]) -> Example:
    """What `apply_chat_template` makes. An answer's labels begin behind its prompt, which is tokenized by itself."""
    processor, messages = model.processor, messages_of(record, model.images)

    def made(count: int, is_prompt: bool = False) -> dict[str, torch.Tensor]:
        return processor.apply_chat_template(
            copy.deepcopy(messages[:count]),
            processor.chat_template,
            add_generation_prompt=is_prompt,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )

    inputs = made(len(messages))
    ids = inputs["input_ids"][0]
    labels = torch.full_like(ids, IGNORE)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = made(number, True)["input_ids"][0]
            begin = len(prompt)
            assert torch.equal(ids[:begin], prompt), "the prompt is no beginning of the conversation"
            stop = begin + int((ids[begin:] == model.end).nonzero()[0]) + 1
            labels[begin:stop] = ids[begin:stop]
    floats = {name: v.float() if v.is_floating_point() else v for name, v in inputs.items()}
    return Example(floats, labels)


def peer_loss(peer: Any, example: Example) -> torch.Tensor:
    """The sum of the losses of one sample's labels."""
    logits = peer(**example.inputs, use_cache=False).logits[0]
    at = (example.labels[1:] != IGNORE).nonzero()[:, 0]
    return torch.nn.functional.cross_entropy(logits[at].float(), example.labels[1:][at], reduction="sum")


def peer_gradients(model: WholeModel, kind: str = "few") -> tuple[float, dict[str, torch.Tensor]]:
    """The sum over samples of the losses of their labels, and its gradients by the class's names."""
    peer, total = model.peer(), 0.0
    for record in model.records(kind):
        loss = peer_loss(peer, example_of(model, record))
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in peer.named_parameters() if p.grad is not None}


def own_gradients(state: TrainState) -> tuple[float, dict[str, torch.Tensor], list[MicroBatch]]:
    """The sum of the losses of the next step's labels, its gradients by the class's names, and the micro-batches."""
    (step, *_) = agreed_steps(state.loader)
    total = 0.0
    for micro in step.micro_batches:
        loss = state.model(**state.loader.to_device(micro).inputs)
        loss.backward()
        total += loss.item()
    found = {named(name): p.grad for name, p in state.model.named_parameters() if p.grad is not None}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}
    return total, whole, step.micro_batches


def named(name: str) -> str:
    """The class's name of a parameter of a block whose activations are computed again."""
    return name.replace("_checkpoint_wrapped_module.", "")


def assert_same_gradients(
    own: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    """Each gradient within the tolerance of its largest number, and of a tenth of it of the largest of all gradients.

    The gradient of a key's bias is zero in exact arithmetic, so only the second bound means something for it.
    """
    floor = 0.1 * tolerance * max(float(g.abs().max()) for g in wanted.values())
    wrong = {}
    for name, gradient in wanted.items():
        found = own.get(name, torch.zeros_like(gradient))
        difference = float((found - gradient).abs().max())
        if difference > tolerance * float(gradient.abs().max()) + floor:
            wrong[name] = (difference, float(gradient.abs().max()))
    assert not wrong
    assert not {name for name, g in own.items() if name not in wanted and g.abs().max() > 0}
