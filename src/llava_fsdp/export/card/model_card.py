"""Write the model card of an exported folder: a `README.md` with metadata for the Hugging Face hub, what the model was
made of, its scores, and how to use it.

The card is computed from the folder's notes (`llava_fsdp.json`) and `config.json`. Of a local path it shows only the
last name.
Its format: https://huggingface.co/docs/hub/model-cards.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from llava_fsdp.export.card.history import BASE, DATA
from llava_fsdp.model.sources.pretrained import HUB_NAME
from llava_fsdp.runtime.files.provenance import README, write_sealed_notes
from llava_fsdp.runtime.files.safe_load import read_json
from llava_fsdp.runtime.files.scores_file import scores_text
from llava_fsdp.version import __version__

KIND, REMARKS, LICENSE = "kind", "remarks", "license"
"""Keys of the notes of an exported folder: its kind, remarks for the reader, and the license of the base model as the
hub's metadata."""
PLACE = "USER/NAME"
"""Name of the model on the hub, as the card has it before the folder is pushed."""
WRITTEN = "<!-- A push by llava_fsdp replaces this text on the hub. Delete this line to keep your own text. -->"
"""Line of a card that a push replaces."""


class FolderKind(Enum):
    """Kind of an exported folder, which decides how it is used."""

    llava_of_transformers = "LLaVA of transformers"
    class_of_transformers = "class of transformers"
    original = "original LLaVA"
    projector = "projector"
    with_adapters = "base with adapters"
    gguf = "GGUF"
    adapters = "adapters"
    adapters_of_class = "adapters of a class of transformers"


TRANSFORMERS = f"""\
With transformers:

```python
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

processor = AutoProcessor.from_pretrained("{PLACE}")
model = AutoModelForImageTextToText.from_pretrained("{PLACE}")
messages = [{{"role": "user", "content": [{{"type": "image"}}, {{"type": "text", "text": "What is this?"}}]}}]
image = Image.open("image.png")
text = processor.apply_chat_template(messages, add_generation_prompt=True)
inputs = processor(text=text, images=[image], ADDED, return_tensors="pt").to(model.device)
made = model.generate(**inputs, max_new_tokens=50)[0, inputs["input_ids"].shape[1] :]
print(processor.decode(made, skip_special_tokens=True))
```
"""
LLAVA = (
    TRANSFORMERS.replace("ADDED", "add_special_tokens=False")
    + """
The chat template already has every special token, so the tokenizer must add none.
"""
)
CLASS = TRANSFORMERS.replace("ADDED, ", "")
CHAT = f"""
With llava_fsdp:

```bash
llava-fsdp chat model.checkpoint={PLACE}
```
"""
VLLM = f"""
With vLLM:

```bash
vllm serve {PLACE}
```

The server samples unless a request has `temperature: 0`.
"""
WITH_ADAPTERS = LLAVA.replace(
    "messages =",
    f'''model.load_adapter("{PLACE}", adapter_kwargs={{"subfolder": "adapter"}})
messages =''',
)
ADAPTERS_IN_VLLM = """
The adapters are in the subfolder `adapter`. With vLLM, from a copy of this repository in the folder `DIR`:

```bash
vllm serve DIR --enable-lora --lora-modules mine=DIR/adapter
```
"""
GGUF = """\
```bash
llama-server --model model.gguf --mmproj mmproj.gguf
ollama create NAME --file Modelfile
```

The server samples unless a request has `temperature: 0`. It shows hidden pixels: put transparent images on white first.

Ollama is untested. Its documentation puts the image before the question, without a line break. For the prompt of
training, start the question with `[img]` and a line break.
"""
ORIGINAL = f"""\
With the original LLaVA (https://github.com/haotian-liu/LLaVA):

```bash
python -m llava.serve.cli --model-path {PLACE} --image-file image.png
```
"""
PROJECTOR = """\
To start stage 2 from it, give `--pretrain_mm_mlp_adapter mm_projector.bin` to the original LLaVA, or
`model.projector=FOLDER` to llava_fsdp.
"""
ADAPTERS = """\
- peft puts them on the language model alone: `PeftModel.from_pretrained(AutoModelForCausalLM..., FOLDER)`.
- vLLM, and peft with transformers' LLaVA class, use other module names. vLLM ignores these adapters without an error.
  Only the original LLaVA and llava_fsdp load the projector (`non_lora_trainables`).
- Serve the merged model instead: `llava-fsdp export source=FOLDER to=DIR dtype=bf16`.
- Or write the base model with the projector, and the adapters with the names of transformers' class beside it:
  `llava-fsdp export source=FOLDER to=DIR format=peft`, then `vllm serve DIR --enable-lora --lora-modules
  NAME=DIR/adapter`.
"""
ADAPTERS_OF_CLASS = """\
- peft puts them on the base model: `PeftModel.from_pretrained(AutoModelForImageTextToText..., FOLDER)`.
- Other trained weights, such as the projector's, are in `non_lora_trainables.safetensors`, if there is such a file.
  Only llava_fsdp loads them.
- Serve the merged model instead: `llava-fsdp export source=FOLDER to=DIR dtype=bf16`.
"""
USES = {
    FolderKind.llava_of_transformers: LLAVA + CHAT,
    FolderKind.class_of_transformers: CLASS + CHAT,
    FolderKind.original: ORIGINAL + CHAT,
    FolderKind.projector: PROJECTOR,
    FolderKind.with_adapters: WITH_ADAPTERS + ADAPTERS_IN_VLLM,
    FolderKind.gguf: GGUF,
    FolderKind.adapters: ADAPTERS,
    FolderKind.adapters_of_class: ADAPTERS_OF_CLASS,
}
"""How a folder of each kind is used."""
IN_VLLM = ("clip_vision_model", "siglip_vision_model")
"""Types of vision towers with which vLLM opens a LLaVA of transformers (docs/serving.md)."""
LIBRARIES = {
    FolderKind.llava_of_transformers: "transformers",
    FolderKind.class_of_transformers: "transformers",
    FolderKind.with_adapters: "transformers",
    FolderKind.adapters: "peft",
    FolderKind.adapters_of_class: "peft",
}
"""Libraries that load a folder, by the names that the hub knows."""


def write_card_and_notes(folder: Path, kind: FolderKind, entries: Mapping[str, Any]) -> None:
    """Write the last two files of an exported folder: the model card, and the notes `llava_fsdp.json` with `entries`
    and the digests of all other files, which must be complete."""
    notes = {**entries, KIND: kind.value}
    (folder / README).write_text(model_card(folder, notes))
    write_sealed_notes(folder, notes)


def model_card(
    folder: Path, notes: Mapping[str, Any], place: str = PLACE, scores: Iterable[Mapping[str, Any]] = ()
) -> str:
    """Return the text of a model card.

    Args:
        folder: the exported folder, whose `config.json` is read if there is one.
        notes: contents of its `llava_fsdp.json`; those of an earlier version of this package say less.
        place: name of the model on the hub.
        scores: entries of `results.json` (`read_scores`); those of other steps or runs are left out.
    """
    file = folder / "config.json"
    config = read_json(file) if file.is_file() else {}
    own_scores = [entry for entry in scores if all(entry.get(key) == notes.get(key) for key in ("run", "step"))]
    kind = next((kind for kind in FolderKind if kind.value == notes.get(KIND)), None)
    parts = [
        f"---\n{metadata(kind, notes, config, place.rpartition('/')[2], own_scores)}---",
        WRITTEN,
        *([f"`{PLACE}` stands for this folder, or its name on the hub."] if place == PLACE else []),
        f"# {place.rpartition('/')[2]}",
        table(("", ""), facts(notes, config)),
        *([f"## Scores\n\n{table_of_scores(own_scores)}"] if own_scores else []),
        *(
            ["## Before you use it\n\n" + "\n".join(f"- {remark}" for remark in notes[REMARKS])]
            if notes.get(REMARKS)
            else []
        ),
        *([f"## How to use it\n\n{usage(kind, config).replace(PLACE, place)}".rstrip()] if kind is not None else []),
    ]
    return "\n\n".join(parts) + "\n"


def usage(kind: FolderKind, config: Mapping[str, Any]) -> str:
    """Return how a folder of a kind is used, with commands and code. `config`: contents of its `config.json`."""
    tower = config.get("vision_config", {}).get("model_type")
    return USES[kind] + (VLLM if kind is FolderKind.llava_of_transformers and tower in IN_VLLM else "")


def metadata(
    kind: FolderKind | None,
    notes: Mapping[str, Any],
    config: Mapping[str, Any],
    name: str,
    scores: Sequence[Mapping[str, Any]],
) -> str:
    """Return the YAML at the head of a model card, by which the hub finds and shows the model. `notes`: content of
    llava_fsdp.json; `config`: of config.json; `name`: the model's; `scores`: of its evaluations."""
    from huggingface_hub import EvalResult, ModelCardData

    recipe = notes.get("recipe", {})
    bases = [base for base in recipe.get(BASE, []) if HUB_NAME.fullmatch(base)]
    results = [
        EvalResult("image-text-to-text", entry["data"], entry["data"], metric, value)
        for entry in scores
        if entry.get("limit") is None  # of all questions, not of the first ones alone
        for metric, value in entry["scores"].items()
    ]
    is_adapter = kind in (FolderKind.adapters, FolderKind.adapters_of_class)
    data = ModelCardData(
        base_model=bases or None,
        datasets=[data for data in recipe.get(DATA, []) if HUB_NAME.fullmatch(data)] or None,
        library_name=None if kind is None else LIBRARIES.get(kind),
        pipeline_tag="image-text-to-text",
        tags=[
            "llava_fsdp",
            *([config["model_type"]] if "model_type" in config else []),
            *(["gguf"] if kind is FolderKind.gguf else []),
        ],
        model_name=name if results else None,
        eval_results=results or None,
        **({"base_model_relation": "adapter" if is_adapter else "finetune"} if bases else {}),
        **notes.get(LICENSE, {}),
    )
    return data.to_yaml() + "\n"


def license_notes(folder: Path) -> dict[str, Any]:
    """Return the entry of the notes about the license, from the model card of the base model or the language model in
    `folder`; empty if the card names none, or cannot be read."""
    from huggingface_hub import metadata_load

    try:
        found = metadata_load(folder / README) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    terms = {key: found[key] for key in ("license", "license_name", "license_link") if found.get(key)}
    if not str(terms.get("license_link", "http")).startswith("http"):  # names a file of the base model's folder
        del terms["license_link"]
    return {LICENSE: terms} if terms else {}


def facts(notes: Mapping[str, Any], config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what is known of a model and its training as the rows of a table."""
    recipe = notes.get("recipe", {})
    trained = ", ".join(notes.get("train", []))
    stage = f"in stage `{notes['stage']}`, {notes.get('step', 0):,} steps" if notes.get("stage") else ""
    rows = {
        "class": next(iter(config.get("architectures") or []), None),
        BASE: ", ".join(map(linked, recipe.get(BASE, []))),
        "trained": " ".join(part for part in (trained, stage) if part),
        DATA: ", ".join(map(linked_data, recipe.get(DATA, []))),
        **{key: str(value) for key, value in recipe.items() if key not in (BASE, DATA)},
        "conversation template": code(notes.get("template")),
        "images": code(notes.get("image_aspect_ratio")),
        "dtype": config.get("dtype") or notes.get("dtype"),
        "card written by": f"llava_fsdp {__version__}",
    }
    return [(key, value) for key, value in rows.items() if value]


def code(value: Any) -> str | None:
    return None if value is None else f"`{value}`"


def linked(name: str) -> str:
    """Return the name of a model as Markdown, with a link if it is on the hub."""
    return f"[{name}](https://huggingface.co/{name})" if HUB_NAME.fullmatch(name) else name


def linked_data(name: str) -> str:
    """Return the name of a dataset as Markdown, with a link if it is on the hub."""
    return f"[{name}](https://huggingface.co/datasets/{name})" if HUB_NAME.fullmatch(name) else name


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def table_of_scores(scores: Sequence[Mapping[str, Any]]) -> str:
    """Return the scores of a model as a table in Markdown, a row for each evaluation."""
    rows = [
        [entry["task"], entry["data"], entry.get("questions") or "", scores_text(entry["scores"])] for entry in scores
    ]
    return table(["task", DATA, "questions", "scores"], rows)
