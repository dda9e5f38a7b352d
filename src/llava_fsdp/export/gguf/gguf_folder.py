"""Write a model folder of transformers as GGUF files, for llama.cpp and Ollama, and compare them with it."""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from llava_fsdp.config import KeptDType
from llava_fsdp.data.images.preprocess import preprocessor_fields
from llava_fsdp.export.card.model_card import REMARKS
from llava_fsdp.export.gguf.gguf_writer import import_gguf
from llava_fsdp.export.gguf.language_file import kind_of, write_language
from llava_fsdp.export.gguf.model_folder import ModelFolder
from llava_fsdp.export.gguf.modelfile import find_texts, modelfile
from llava_fsdp.export.gguf.read_back import keys_of, prove_files
from llava_fsdp.export.gguf.run_llama_cpp import NoAnswer, has_llama_cpp, prove_by_llama_cpp
from llava_fsdp.export.gguf.vision_file import CLIP, CLIP_FAULT, check_vision, write_vision
from llava_fsdp.export.gguf.vocabulary import ENDS, normalizes, splitting_rule
from llava_fsdp.export.write.formats import SourceModel, check_hf, hf_config
from llava_fsdp.export.write.remarks import log_remarks
from llava_fsdp.export.write.whole_folder import WholeSource
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.provenance import read_notes
from llava_fsdp.runtime.files.safe_load import LARGE, read_json
from llava_fsdp.runtime.process.host import read_host
from llava_fsdp.runtime.text.humanize import readable
from llava_fsdp.runtime.text.log import log

MODEL, MMPROJ = "model.gguf", "mmproj.gguf"
TRANSFORMERS = "transformers"
"""Subfolder with the model in transformers' format, of which the files are made; it is removed at the end."""


def check_for_llama_cpp(source: SourceModel | WholeSource, with_clip: bool) -> None:
    """Raise an error if a model cannot be written for llama.cpp.

    Args:
        with_clip: whether a CLIP tower is accepted although llama.cpp computes it wrongly.

    Raises:
        ConfigError: the package gguf is not installed.
        ModelError: llama.cpp would compute something else with this model.
    """
    import_gguf()
    if isinstance(source, WholeSource):
        raise ModelError(
            "format=gguf writes LLaVA models; for a whole model of transformers export format=hf, and give that folder "
            "to llama.cpp's convert_hf_to_gguf.py"
        )
    check_hf(source.model, source.aspect)
    config = hf_config(source, torch.float32, source.vocabulary).to_dict()
    # all of these raise ModelError for what llama.cpp lacks; what they return is not needed here
    check_vision(config, with_clip)
    kind_of(config["text_config"])
    tokenizer = source.model.parts.language_folder / "tokenizer.json"
    if tokenizer.is_file():
        splitting_rule(read_json(tokenizer, largest=LARGE), tokenizer)


def write_gguf_folder(source: Path, export_folder: Path, asked: KeptDType, name: str) -> dict[str, Any]:
    """Write `model.gguf`, `mmproj.gguf` and a `Modelfile` for Ollama into the folder `export_folder`, which exists.
    Return what its `llava_fsdp.json` is to say besides digests. Raise ModelError if llama.cpp would tokenize texts
    otherwise, or has no place for a tensor.

    Args:
        source: folder of a LLaVA in transformers' format, which `llava-fsdp export` wrote.
        asked: dtype of the matrices; `keep`: each tensor's own.
        name: name of the model, which llama.cpp shows.
    """
    folder = ModelFolder(source)
    write_language(folder, export_folder / MODEL, asked, name)
    write_vision(folder, export_folder / MMPROJ, asked, name)
    tokenizer: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    keys = keys_of(export_folder / MODEL)
    ends = [keys[f"tokenizer.ggml.{end}_token_id"] for end in ENDS if f"tokenizer.ggml.{end}_token_id" in keys]
    stops = [keys["tokenizer.ggml.tokens"][number] for number in ends]
    (export_folder / "Modelfile").write_text(modelfile(find_texts(tokenizer), stops))
    notes = {key: value for key, value in read_notes(source).items() if key not in ("files", "digest", "dtype")}
    remarks = [*log_remarks(remarks_on(folder)), *notes.get(REMARKS, [])]
    return {**notes, "dtype": asked.value, REMARKS: remarks}


def remarks_on(folder: ModelFolder) -> list[str]:
    """Return what llama.cpp does otherwise than training, one text for each difference."""
    side = folder.vision["image_size"]
    found = [
        "llama.cpp pads an image to a square and resizes it by arithmetic of its own. Send "
        f"images of {side} x {side} pixels, made with Pillow's bicubic filter, for the answers of training"
        + (" after padding with the mean colour." if preprocessor_fields(folder.path).get("do_pad") else ".")
    ]
    if normalizes(folder.path):
        found.append(
            "llama.cpp does not bring a text into Unicode's form NFC, as training did; send texts in this form."
        )
    window = folder.language.get("sliding_window")
    if folder.language["model_type"] == "mistral" and window:
        found.append(f"llama.cpp has no sliding window of {window} tokens for this model: keep conversations shorter.")
    if folder.vision["model_type"] == CLIP:
        found.insert(0, f"Answers about images are wrong: {CLIP_FAULT}.")
    return found


def prove_gguf_folder(source: Path, export_folder: Path) -> str:
    """Compare the GGUF files in `export_folder` with the model folder of which they were made: every tensor, key and
    token id, and, if the package xllamacpp is installed, the answers of llama.cpp. Return what was compared, in words.
    Raise ModelError if they differ."""
    folder = ModelFolder(source)
    prove_files(folder, export_folder)
    equal = "its tensors and token ids are the source's"
    if not has_llama_cpp():
        return f"{equal}; llama.cpp was not run (pip install xllamacpp)"
    needed = 4 * sum(math.prod(tensor.shape) for tensor in folder.tensors.values())
    if read_host().free < 2 * needed:
        return f"{equal}; llama.cpp was not run: transformers and it need {readable(2 * needed)} of memory together"
    try:
        found = prove_by_llama_cpp(source, export_folder, with_images=folder.vision["model_type"] != CLIP)
    except NoAnswer as error:
        log().warning("%s", error)
        return f"{equal}; llama.cpp gave no answer"
    return f"llama.cpp answers as transformers: {found}"
