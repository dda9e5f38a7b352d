"""Where an answer of an export ends: in transformers as in `chat`, for every way in which a model's files say it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import published, write_tokenizer
from forged import forge_notes
from PIL import Image
from reference import EXPORTED
from safetensors.torch import load_file, save_file
from small import conversion, make_config, write_json
from tiers import slow_after
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, GenerationConfig, pipeline

from llava_fsdp.chat.assistant import Assistant, Question
from llava_fsdp.config import AUTO, AspectRatio
from llava_fsdp.data.records.record import Turn
from llava_fsdp.data.text.templates import TEMPLATES
from llava_fsdp.data.text.tokens.tokenizer import Tokenizer, open_tokenizer
from llava_fsdp.export.main import export
from llava_fsdp.export.write.adapter_folder import small_files
from llava_fsdp.export.write.chat_template import first_image_conversation_with_other_ids
from llava_fsdp.export.write.formats import source_of_run, write_hf_except_weights
from llava_fsdp.export.write.generation_file import check_ends
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.provenance import check_folder
from llava_fsdp.train import main as train

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 33, "repetition_penalty": 1.25}
FAMILIES = {
    "smollm": ("chat_template", CHATML, "<|im_end|>"),
    "v1": ("v1", "", "</s>"),
    "qwen2_5": ("chat_template", published()["qwen2_5"], "<|im_end|>"),
    "llama3": ("chat_template", published()["llama3"], "<|eot_id|>"),
    "gemma": ("chat_template", published()["gemma"], "<end_of_turn>"),
    "phi3": ("chat_template", published()["phi3"], "<|end|>"),
    "mistral": ("mistral_instruct", "", "</s>"),
    "llama_2": ("llava_llama_2", "", "</s>"),
    "chatml": ("chatml", CHATML, "<|im_end|>"),
    "plain": ("plain", CHATML, "\n"),
}
"""Name -> the setting `data.template`, a language model's own template or "", and what ends an answer."""


def write_family(name: str, parts: Path, folder: Path) -> Path:
    """Parts whose language model is a base model: its files name other tokens as the end than its template."""
    code = FAMILIES[name][1]
    shutil.copytree(parts, folder)
    if code:
        shutil.rmtree(folder / "language")
        write_tokenizer(code, folder / "language")
    tokenizer = open_tokenizer(folder / "language")
    config = json.loads((parts / "language" / "config.json").read_text())
    first, second = others(tokenizer)
    write_json(folder / "language" / "config.json", config | {"vocab_size": tokenizer.size + 3, "eos_token_id": first})
    given = {"eos_token_id": [first, second], "bos_token_id": 1, "transformers_version": "4.30.0", **SAMPLING}
    write_json(folder / "language" / "generation_config.json", given)
    return folder


def others(tokenizer: Tokenizer) -> list[int]:
    """The ids of two special tokens that no template writes after an answer."""
    found = [tokenizer.special(text) for text in ("<eos>", "<bos>", "<unk>", "<s>")]
    return [number for number in found if number is not None][:2]


def run_of(name: str, parts: Path, dataset: Path, folder: Path) -> Path:
    parts = write_family(name, parts, folder / "parts")
    values = [f"data.template={FAMILIES[name][0]}", "max_steps=1", f"data.index={folder / 'index'}"]
    train.train(make_config(parts, dataset, folder / "run", *values, *EXPORTED))
    return folder / "run"


def prescribe(folder: Path, tokens: list[int]) -> None:
    """Change an export so that it writes each of these tokens after the one before it, over and over."""
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if name.startswith("language_model") and ("o_proj" in name or "down_proj" in name):
            tensor.zero_()
    embed = weights["language_model.model.embed_tokens.weight"].normal_(generator=generator)
    weights["language_model.model.norm.weight"].fill_(1.0)
    head = weights["language_model.lm_head.weight"].zero_()
    for before, after in zip([tokens[-1], *tokens[:-1]], tokens, strict=True):
        head[after] += embed[before]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    forge_notes(folder)


@pytest.mark.parametrize("name", slow_after(1, FAMILIES))
def test_transformers_ends_an_answer_where_chat_does(name: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """With the token of the template, and with those that the language model's two files name; sampling is kept."""
    folder = run_of(name, parts, dataset, tmp_path) / "export"
    kept = json.loads((folder / "generation_config.json").read_text())
    ours = open_tokenizer(folder)
    named = others(ours)
    assert SAMPLING.items() <= kept.items() and {*named} < {*kept["eos_token_id"]}
    image = Image.effect_noise((40, 30), 80).convert("RGB")
    image.save(tmp_path / "a.png")
    content = [{"type": "image", "image": image}, {"type": "text", "text": "what is it?"}]
    messages = [{"role": "user", "content": content}]
    processor = AutoProcessor.from_pretrained(folder)
    asked = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    last = int(asked["input_ids"][0, -1])
    words = [ours.encode("a red circle")[number].id for number in (-1, 0)]
    by_template = [token for token in kept["eos_token_id"] if token not in named]
    assert by_template and [ours.encode(f"a{FAMILIES[name][2]}")[-1].id] <= by_template
    for end in (by_template[0], *named):
        prescribe(folder, [last, *words, end])
        question = Question([Turn("human", "<image>\nwhat is it?")], [tmp_path / "a.png"], "here")
        asked_of = Assistant(str(folder), AUTO, AspectRatio.pad)
        [answer] = asked_of.answers([question], 9)
        write = pipeline("image-text-to-text", model=str(folder), device="cpu")
        [said] = write(text=messages, return_full_text=False, generate_kwargs={
            "max_new_tokens": 9, "do_sample": False, "repetition_penalty": 1.0,
        })  # fmt: skip
        assert answer and said["generated_text"].strip() == answer
        model = AutoModelForImageTextToText.from_pretrained(folder)
        written = model.generate(**asked, max_new_tokens=9, do_sample=False, repetition_penalty=1.0)
        found = written[0, asked["input_ids"].shape[1] :].tolist()
        # where the prompt ends with the image, as that of `plain` does, its features decide about the first token
        assert (found[-3:] if last == model.config.image_token_id else found) == [*words, end]


@pytest.fixture(scope="module")
def adapted(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with adapters over a base model that names other ends than its template."""
    folder = tmp_path_factory.mktemp("adapted")
    made = write_family("v1", parts, folder / "parts")
    values = ["model.lora.r=3", "max_steps=2", "optim.warmup_ratio=0", "checkpoint.every=1", "data.template=v1"]
    train.train(make_config(made, dataset, folder / "run", *values, *EXPORTED, stage="finetune_lora"))
    return folder / "run"


@pytest.mark.slow
def test_every_form_of_a_model_names_what_ends_its_answers(adapted: Path, tmp_path: Path) -> None:
    """An adapter's folder, merged weights, a checkpoint, an export of an export, the original's format and back."""
    sources = [adapted / "adapter", adapted / "checkpoints" / "step-000001", adapted / "export"]
    made = [export(conversion(source, tmp_path / f"hf{n}", "verify=false")) for n, source in enumerate(sources)]
    form = ["format=llava", "verify=false"]
    made += [export(conversion(source, tmp_path / f"llava{n}", *form)) for n, source in enumerate(sources)]
    made.append(export(conversion(made[-1], tmp_path / "back", "verify=false")))
    for folder in (adapted / "adapter", adapted / "export", *made):
        found = json.loads((folder / "generation_config.json").read_text())
        assert found["eos_token_id"] == [0, 1, 2] and SAMPLING.items() <= found.items(), folder
        assert "_from_model_config" not in found, "transformers 4 would take the end in config.json alone"
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [0, 1, 2]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_an_adapter_for_any_language_model_names_them(kind: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    made = write_family("smollm", parts, tmp_path / "parts")
    config = json.loads((made / "language" / "config.json").read_text())
    write_json(made / "language" / "config.json", config | {"model_type": kind})
    cfg = make_config(made, dataset, tmp_path / "run", "data.template=chatml")
    source = source_of_run(build_llava(find_parts(cfg.model), cfg.model, torch.float32), cfg, "", 0)
    found = json.loads(small_files(source, torch.float32)["generation_config.json"])
    tokenizer = open_tokenizer(made / "language")
    assert {*found["eos_token_id"]} == {*others(tokenizer), tokenizer.special("<|im_end|>")}


WHOLE = {
    "llava": [],
    "llava_next": ["data.image_aspect_ratio=anyres", "model.patch_merge=spatial_unpad",
                   "data.grid_pinpoints=[[28,56],[56,28]]", "data.max_length=512"],
    "llava_onevision": ["data.image_aspect_ratio=anyres_max", "data.max_tiles=2", "model.patch_merge=spatial_unpad",
                        "data.grid_pinpoints=[[28,56],[56,28]]", "data.max_length=512"],
}  # fmt: skip


@pytest.mark.parametrize("kind", slow_after(1, WHOLE))
def test_whole_models_keep_what_ends_their_answers(kind: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Of the file beside their config.json, of that file's top level, and of its part for the language model."""
    vision = json.loads((parts / "vision" / "config.json").read_text())
    language = json.loads((parts / "language" / "config.json").read_text())
    config = AutoConfig.for_model(
        kind, vision_config=vision, text_config={**language, "eos_token_id": 2}, vision_feature_layer=-2,
        vision_feature_select_strategy="default", tie_word_embeddings=False, image_seq_length=4,
    )  # fmt: skip
    config.image_token_id = language["vocab_size"] - 1
    if kind in ("llava_next", "llava_onevision"):
        config.image_grid_pinpoints = [[56, 28], [28, 56]]
    if kind == "llava_onevision":
        config.vision_aspect_ratio = "anyres_max_2"
    folder = tmp_path / "whole"
    shutil.copytree(parts / "language", folder)
    config.save_pretrained(folder)
    write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | {"eos_token_id": [7]})
    shutil.copyfile(parts / "vision" / "preprocessor_config.json", folder / "preprocessor_config.json")
    write_json(folder / "generation_config.json", {"eos_token_id": [5, 6], **SAMPLING})
    words = [f"model.checkpoint={folder}", "model.projector=auto", "model.random_weights=false", "data.template=v1"]
    cfg = make_config(parts, dataset, tmp_path / "run", *words, *WHOLE[kind])
    source = source_of_run(build_llava(find_parts(cfg.model), cfg.model, torch.float32), cfg, "", 0)
    (tmp_path / "export").mkdir()
    write_hf_except_weights(source, torch.float32, tmp_path / "export")
    found = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    assert found["eos_token_id"] == [2, 5, 6, 7] and SAMPLING.items() <= found.items()


@pytest.mark.parametrize(("written", "ends"), [([2], [2, 5]), ([2, 5], [2]), (None, [2]), ([3], [2]), (7, [5])])
def test_an_end_that_generate_does_not_know_is_an_error(written: Any, ends: list[int], tmp_path: Path) -> None:
    write_json(tmp_path / "generation_config.json", {"eos_token_id": written, "pad_token_id": 1, **SAMPLING})
    with pytest.raises(ModelError, match="the ends of an answer, which are"):
        check_ends(tmp_path, ends, rows=40)


def test_any_number_of_ends_is_tried(tmp_path: Path) -> None:
    """Also those without a row, which cannot be written."""
    ends = [*range(3, 24), 99]
    write_json(tmp_path / "generation_config.json", {"eos_token_id": ends, "pad_token_id": 1, "num_beams": 3})
    check_ends(tmp_path, ends, rows=40)


def test_an_end_that_is_no_token_is_told(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """In the log and in the folder; the reader's file is no part of the digests."""
    write_tokenizer(CHATML, tmp_path / "parts" / "language")  # without </s>
    shutil.copytree(parts / "vision", tmp_path / "parts" / "vision")
    config = json.loads((parts / "language" / "config.json").read_text())
    size = open_tokenizer(tmp_path / "parts" / "language").size
    write_json(tmp_path / "parts" / "language" / "config.json", config | {"vocab_size": size})
    run = tmp_path / "run"
    train.train(make_config(tmp_path / "parts", dataset, run, "data.template=v1", "max_steps=1", *EXPORTED))
    assert "stop_strings=['</s>']" in (run / "export" / "README.md").read_text()
    assert "README.md" not in json.loads((run / "export" / "llava_fsdp.json").read_text())["files"]
    (run / "export" / "README.md").write_text("a card of the user's own")
    check_folder(run / "export")
    model = AutoModelForImageTextToText.from_pretrained(run / "export")
    assert model.generation_config.eos_token_id == 2, "the base model's alone"


def test_a_processor_that_gives_other_ids_than_training_is_found(
    parts: Path, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An image has as many tokens as in training, and messages with images the ids of training."""
    cfg = make_config(parts, dataset, tmp_path / "run", "data.template=v1")
    source = source_of_run(build_llava(find_parts(cfg.model), cfg.model, torch.float32), cfg, "", 0)
    folder, ours, form = tmp_path / "export", open_tokenizer(parts / "language"), TEMPLATES["v1"]
    folder.mkdir()
    write_hf_except_weights(source, torch.float32, folder)
    assert (
        "gives other token ids" not in caplog.text
        and first_image_conversation_with_other_ids(folder, ours, form, False, source.image_tokens) is None
    )
    settings = json.loads((folder / "processor_config.json").read_text())
    write_json(folder / "processor_config.json", settings | {"num_additional_image_tokens": 2})
    assert first_image_conversation_with_other_ids(folder, ours, form, False, source.image_tokens) is not None
