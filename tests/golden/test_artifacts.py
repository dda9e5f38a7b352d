"""The original's folders through ours and back to the bit, and the original's own numbers on every side."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_folder import golden_folder
from safetensors.torch import load_file
from small import conversion
from tiers import slow_after
from torch.nn import functional
from transformers import LlavaForConditionalGeneration

from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.export.main import export
from llava_fsdp.export.prove.verify_logits import load_copy
from llava_fsdp.model.llava.llava import Llava, build_llava
from llava_fsdp.model.load_weights import find_weights
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.model.sources.pretrained_config import read_model

MODELS = golden_folder() / "model"
IMAGE, IGNORE = -200, -100
# The tower of transformers 5 adds in another order than that of 4.37: 1.5e-6 in its features (golden README).
CLOSE = 1e-5


@dataclass(frozen=True)
class Batch:
    """A golden batch as the original merged it."""

    name: str
    variant: str
    rows: list[torch.Tensor]
    """Ids of every row, a picture's positions as -200."""
    images: torch.Tensor
    labels: torch.Tensor
    lengths: list[int]
    loss: float
    expected: dict[str, torch.Tensor]

    def ids(self, image_id: int) -> torch.Tensor:
        """int64 [rows, length], padded on the right."""
        padded = torch.zeros((len(self.rows), max(self.lengths)), dtype=torch.int64)
        for row, ids in enumerate(self.rows):
            padded[row, : len(ids)] = torch.where(ids == IMAGE, image_id, ids)
        return padded

    @property
    def image_positions(self) -> torch.Tensor:
        return torch.nonzero((self.ids(IMAGE) == IMAGE).flatten()).flatten()


def cases() -> tuple[list[tuple[str, str]], int]:
    """Valid cases that this folder has, and how many of the index it lacks."""
    found, missing = [], 0
    for entry in json.loads((MODELS / "batches" / "index.json").read_text()):
        for variant, said in entry.get("expected", {}).items():
            if said.get("loss") is None or entry["name"] in ("im_start_end", "anyres_spatial", "anyres_spatial_unpad"):
                continue
            files = [entry["inputs_file"], f"{entry['name']}.{variant}.expected.safetensors"]
            there = all((MODELS / "batches" / f).is_file() for f in files) and (MODELS / f"llava-{variant}").is_dir()
            found += [(entry["name"], variant)] if there else []
            missing += not there
    return found, missing


CASES, MISSING = cases()
VARIANTS = [v for v in ("mha32", "mha32-bin", "gqa64") if (MODELS / f"llava-{v}").is_dir()]


def read_batch(name: str, variant: str) -> Batch:
    index = {e["name"]: e for e in json.loads((MODELS / "batches" / "index.json").read_text())}
    entry = index[name]
    inputs = load_file(MODELS / "batches" / entry["inputs_file"])
    expected = load_file(MODELS / "batches" / f"{name}.{variant}.expected.safetensors")
    limit = (entry["config_overrides"] or {}).get("tokenizer_model_max_length")
    slots = iter([inputs[k] for k in sorted(inputs) if k.startswith("images.")] or inputs["images"])
    rows, images = [], []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        ids = ids[mask.bool()]
        if not (ids == IMAGE).any():
            next(slots)  # LLaVA llava_arch.py:231-240: a row without a picture uses one up
        pieces: list[torch.Tensor] = []
        for token in ids:
            picture = next(slots) if token == IMAGE else None
            if picture is not None:
                images.append(picture if picture.ndim == 4 else picture[None])
            repeat = 1 if picture is None else 16 * len(images[-1])
            pieces.append(token.expand(repeat))
        rows.append(torch.cat(pieces)[:limit])
    shown = torch.cat(images) if images else torch.zeros((0, 3, 56, 56))
    said = entry["expected"][variant]
    assert [len(r) for r in rows] == said["merged_lengths"]
    labels = expected["labels"][:, 1:]
    return Batch(name, variant, rows, shown, labels, said["merged_lengths"], said["loss"], expected)


class Sides:
    """One model in every form, converted and loaded when first asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.made: dict[Any, Any] = {}

    def folder_of(self, variant: str, side: str) -> Path:
        """original, hf (converted from it) or back (the original's again)."""
        if side == "original":
            return MODELS / f"llava-{variant}"
        to = self.folder / f"{variant}-{side}"
        if not to.is_dir():
            before = self.folder_of(variant, "original" if side == "hf" else "hf")
            export(conversion(before, to, "format=hf" if side == "hf" else "format=llava"))
        return to

    def ours(self, variant: str, side: str) -> Llava:
        if (variant, side) not in self.made:
            cfg = read_model(self.folder_of(variant, side))
            parts = find_parts(cfg)
            model = build_llava(parts, cfg, torch.float32)
            self.made[variant, side] = load_copy(model, find_weights(model, parts, cfg), torch.float32)
        return self.made[variant, side]

    def theirs(self, variant: str) -> LlavaForConditionalGeneration:
        if variant not in self.made:
            folder = self.folder_of(variant, "hf")
            model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
            self.made[variant] = model.eval()
        return self.made[variant]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    yield Sides(tmp_path_factory.mktemp("sides"))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / "model.safetensors").is_file():
        return load_file(folder / "model.safetensors")
    return torch.load(folder / "pytorch_model.bin", weights_only=True)


@pytest.mark.parametrize("variant", slow_after(1, VARIANTS))
def test_original_to_hf_and_back_is_bit_identical(variant: str, sides: Sides) -> None:
    before, after = sides.folder_of(variant, "original"), sides.folder_of(variant, "back")
    a, b = tensors_of(before), tensors_of(after)
    assert list(a) == list(b) or a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name
    assert json.loads((before / "config.json").read_text()) == json.loads((after / "config.json").read_text())
    beside = [p.name for p in before.iterdir() if p.suffix in (".json", ".model") and p.name != "config.json"]
    for name in beside:
        if name != "generation_config.json":
            assert (before / name).read_bytes() == (after / name).read_bytes(), name
        else:
            assert json.loads((before / name).read_text()) == json.loads((after / name).read_text())


@pytest.mark.parametrize("variant", VARIANTS)
def test_hf_folder_has_the_hubs_names_and_rows(variant: str, sides: Sides) -> None:
    tensors = tensors_of(sides.folder_of(variant, "hf"))
    original = tensors_of(sides.folder_of(variant, "original"))
    assert len(tensors) == len(original)
    embed = tensors["language_model.model.embed_tokens.weight"]
    assert embed.shape[0] == 2048 and torch.equal(embed[:2000], original["model.embed_tokens.weight"])
    tower = "vision_tower.vision_model.embeddings.patch_embedding.weight"
    assert torch.equal(tensors[tower], original[f"model.vision_tower.{tower}"])


def test_cases_are_there(count: Callable) -> None:
    """The cut folder has a dozen; what a folder lacks of its index is counted."""
    assert len(CASES) >= 12
    count("logits of batches", "to be compared, on three sides", len(CASES))
    if MISSING:
        count("logits of batches", "not in this folder", MISSING)


@torch.no_grad()
@pytest.mark.parametrize(("name", "variant"), CASES)
def test_logits_and_losses_are_the_originals(name: str, variant: str, sides: Sides) -> None:
    """On the original's folder, on ours of transformers' format, in transformers itself, and on the way back."""
    batch = read_batch(name, variant)
    last = torch.tensor([r * max(batch.lengths) + n - 1 for r, n in enumerate(batch.lengths)])
    results = {s: our_outcome(sides.ours(variant, s), batch) for s in ("original", "hf", "back")}
    results["transformers"] = their_outcome(sides.theirs(variant), batch)
    for side, (embeds, logits) in results.items():
        for row, length in enumerate(batch.lengths):
            wanted = batch.expected["inputs_embeds"][row, :length]
            torch.testing.assert_close(embeds[row, :length], wanted, rtol=0, atol=CLOSE, msg=lambda m, s=side: s + m)
        torch.testing.assert_close(logits[last], batch.expected["logits_last"], rtol=0, atol=CLOSE)
        if batch.loss == batch.loss:
            assert loss_of(logits, batch) == pytest.approx(batch.loss, rel=1e-6), side
    for side in ("hf", "back"):
        assert torch.equal(results[side][1], results["original"][1]), "the bits are the same, so the logits are"


def our_outcome(model: Llava, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, length, hidden] and [rows * length, vocabulary]"""
    seen: list[torch.Tensor] = []
    hook = model.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    ids = batch.ids(0)
    logits = model(
        ids,
        None,
        {
            "positions": batch.image_positions,
            "rows": torch.arange(len(batch.image_positions)),
            "tiles": batch.images,
        },
        torch.zeros(0),  # nothing is drawn for samples
        torch.arange(ids.numel()),
        return_logits=True,
    )
    hook.remove()
    return seen[0], logits


def their_outcome(model: LlavaForConditionalGeneration, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    seen: list[torch.Tensor] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    pictures = batch.images if len(batch.images) else None
    logits = model(input_ids=batch.ids(model.config.image_token_id), pixel_values=pictures).logits
    hook.remove()
    return seen[0], logits.flatten(0, 1)[:, :2000]


def loss_of(logits: torch.Tensor, batch: Batch) -> float:
    predicted = logits.view(*batch.ids(0).shape, -1)[:, :-1]
    return float(functional.cross_entropy(predicted.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE))


def test_projector_is_that_of_stage_1(sides: Sides, tmp_path: Path) -> None:
    """The original's second stage started from this very file and took no step."""
    export(conversion(sides.folder_of("mha32", "hf"), tmp_path / "p", "format=projector"))
    before = torch.load(MODELS / "llava-mha32-pretrain" / "mm_projector.bin", weights_only=True)
    after = torch.load(tmp_path / "p" / "mm_projector.bin", weights_only=True)
    twin = load_file(tmp_path / "p" / "mm_projector.safetensors")
    assert list(before) == list(after) and before.keys() == twin.keys()
    assert all(torch.equal(before[n], after[n]) and torch.equal(before[n], twin[n]) for n in before)
    a, b = (json.loads((f / "config.json").read_text()) for f in (MODELS / "llava-mha32-pretrain", tmp_path / "p"))
    assert {**a, "image_aspect_ratio": "pad"} == b, "this one's second stage pads"


def test_stage_1_folder_and_a_language_model_make_a_whole_model(sides: Sides, tmp_path: Path) -> None:
    parts = [f"language={MODELS / 'llm-mha32'}", "format=llava", "image_aspect_ratio=pad"]
    export(conversion(MODELS / "llava-mha32-pretrain", tmp_path / "whole", *parts))
    before, after = tensors_of(MODELS / "llava-mha32"), tensors_of(tmp_path / "whole")
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("form", ["hf", "llava"])
@pytest.mark.parametrize("tokenizer", slow_after(1, ["hf4_legacy_false", "hf4_legacy_default"]))
def test_an_export_makes_the_ids_of_its_source(tokenizer: str, form: str, tmp_path: Path) -> None:
    """`legacy` and added tokens leave with the model, whatever transformers writes of them."""
    source = tmp_path / "source"
    shutil.copytree(MODELS / "llava-mha32", source)
    for file in (golden_folder() / "tokenizer" / tokenizer).iterdir():
        shutil.copyfile(file, source / file.name)
    (source / "added_tokens.json").write_text('{"<im_start>": 1998}')
    made = export(conversion(source, tmp_path / "made", f"format={form}", f"vision={next(MODELS.glob('clip-*'))}"))
    read, written = open_tokenizer(source, 2000), open_tokenizer(made, 2000)
    assert read.legacy == written.legacy == (tokenizer == "hf4_legacy_default")
    assert written.special("<im_start>") == 1998
    for text in ("a</s>USER: b  c", "<im_start>a", "</s> x"):
        assert [t.id for t in written.encode(text)] == [t.id for t in read.encode(text)]
