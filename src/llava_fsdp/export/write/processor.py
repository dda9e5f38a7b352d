"""Write the tokenizer and image preprocessing of an exported model, with which transformers gives the same token ids
and pixels as training.

Arguments of many functions here:
    folder: the folder with the tokenizer or the image preprocessing of training.
    export_folder: the exported folder, before it gets its final name.
    vocab_size: number of rows of the trained model's embeddings.
    start_end: whether training puts `<im_start>` and `<im_end>` around every image.
    pads: whether images are padded to squares.
"""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    InternVLConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import is_torchvision_available

from llava_fsdp.data.images.anyres import Size
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.images.preprocess import preprocessor_fields, read_preprocessor
from llava_fsdp.data.records.record import IMAGE_TAG
from llava_fsdp.data.text.chat_template.jinja_template import ChatTemplate, open_template
from llava_fsdp.data.text.chat_template.message_parts import TEXT, Message
from llava_fsdp.data.text.chat_template.template_file import FILE, special_tokens
from llava_fsdp.data.text.templates import Template
from llava_fsdp.data.text.tokens.tokenizer import (
    SPACE,
    LlamaTokenizer,
    added_tokens,
    is_legacy,
    open_tokenizer,
    read_optional,
)
from llava_fsdp.export.write.chat_template import (
    VIDEO_TAG,
    GapRule,
    chat_template,
    find_gap,
    first_conversation_with_other_ids,
    first_image_conversation_with_other_ids,
    own_chat_template,
)
from llava_fsdp.export.write.older_transformers import older_tokenizer
from llava_fsdp.model.vision_tower import image_size, patch_size
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.safe_load import LARGE, library_errors, read_json
from llava_fsdp.runtime.text.log import log

PAD_TOKEN = "<pad>"
VIDEO_FILE = "video_preprocessor_config.json"
ROW_MULTIPLE = 64
PROBES = ("a  b   c", " leading", "\n\tx  ", "1 234", "größe 中文 🙂", "USER: a ASSISTANT: b")
"""Test texts for `check_same_ids`. Wrongly exported tokenizers gave other token ids for them than training."""


def has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.model").is_file() or (folder / "tokenizer.json").is_file()


class TokenIds(NamedTuple):
    """Ids of tokens that the export adds to the tokenizer."""

    image: int
    pad: int
    video: int | None
    """Id of `<video>`; None unless the model is exported as LLaVA-OneVision."""


def write_tokenizer(
    folder: Path,
    export_folder: Path,
    language: PretrainedConfig,
    template_name: str,
    start_end: bool,
    video: bool = False,
) -> tuple[TokenIds, int]:
    """Write a tokenizer for transformers, with an `<image>` token, a padding token and, with `video`, a `<video>`
    token. Return the ids of these tokens, and the number of rows that the exported model's embeddings must have.

    As in the hub's conversions of LLaVA, new ids follow the existing ones, and the number of rows is rounded up to a
    multiple of 64. A language model that has enough rows already keeps its size. If `folder` has no tokenizer, nothing
    is written.
    """
    vocab_size = language.vocab_size
    if lacks_tokenizer(folder, export_folder):
        made = TokenIds(vocab_size, vocab_size + 1, vocab_size + 2 if video else None)  # image, padding, video
        return made, rows_for(made, vocab_size)
    ours = open_tokenizer(folder, vocab_size)  # before transformers opens it, whose errors are less clear
    with library_errors(f"{folder}: transformers cannot read its tokenizer"):
        if (folder / "tokenizer.model").is_file():
            # with `config`, as transformers cannot read the config.json of an original LLaVA folder
            tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, config=language, trust_remote_code=False, local_files_only=True
            )
        else:
            tokenizer = from_file(folder)
    tokenizer.add_tokens([IMAGE_TAG, VIDEO_TAG] if video else [IMAGE_TAG], special_tokens=True)
    if tokenizer.pad_token is None or tokenizer.pad_token == tokenizer.unk_token:
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
    tokenizer.chat_template = None
    tokenizer.save_pretrained(export_folder)
    template = open_template(template_name, folder, ours)
    # whether conversations begin with the BOS token in training; if not, the exported tokenizer must not add it
    same_bos = template.adds_bos or begins_with_bos(template, folder)
    if ours.bos is None or not same_bos:
        leave_bos_out(export_folder)
    if (folder / "tokenizer.model").is_file():
        keep_llama(folder, export_folder)
    if isinstance(ours, LlamaTokenizer):
        write_llama(export_folder, ours.legacy)
    path = export_folder / "tokenizer_config.json"
    older = older_tokenizer(read_json(path), read_json(export_folder / "tokenizer.json", largest=LARGE))
    path.write_text(json.dumps(older, indent=2, ensure_ascii=False) + "\n")
    check_same_ids(folder, export_folder, vocab_size, same_bos)
    with library_errors(f"{export_folder}: transformers cannot read the tokenizer that was written"):
        written = from_file(export_folder)
        # whether the chat template must put a space before text behind an image, for the token ids of training
        gap = find_gap(written, ours) if template.adds_bos else GapRule(False)
    write_template(export_folder, template, start_end, ours.bos is not None, gap, video)
    image, pad = tokenizer.convert_tokens_to_ids(IMAGE_TAG), tokenizer.pad_token_id
    made = TokenIds(image, pad, tokenizer.convert_tokens_to_ids(VIDEO_TAG) if video else None)
    return made, rows_for(made, vocab_size)


def rows_for(ids: TokenIds, vocab_size: int) -> int:
    """Return the number of rows that an exported model's embeddings must have: that of the trained model or, if new
    tokens need more, the next multiple of 64."""
    needed = max(number for number in ids if number is not None) + 1
    return vocab_size if needed <= vocab_size else -(-needed // ROW_MULTIPLE) * ROW_MULTIPLE


def begins_with_bos(template: Template | ChatTemplate, folder: Path) -> bool:
    """Return whether the language model's own chat template writes the BOS token, so that transformers' processor must
    not add one; False for a conversation template of llava_fsdp."""
    bos = special_tokens(folder).get("bos_token")
    if not bos or not isinstance(template, ChatTemplate):
        return False
    return template.render([Message("human", TEXT, ("What is it?",))]).startswith(bos)


def write_template(
    export_folder: Path,
    template: Template | ChatTemplate,
    start_end: bool,
    adds_bos: bool = False,
    gap: GapRule | None = None,
    video: bool = False,
) -> None:
    """Write the chat template of an exported model for transformers.

    Args:
        start_end: whether each image is between `<im_start>` and `<im_end>`.
        adds_bos: whether a conversation begins with the BOS token; ignored for the language model's own template.
        gap: rule for where to put a space before the text that follows an image; None: nowhere. With the language
            model's own template, with which training tokenizes text as transformers does, only before a text that
            follows a BOS token.
        video: accept videos in messages, which are treated like images.
    """
    gap = GapRule(False) if gap is None else gap
    if isinstance(template, ChatTemplate):
        code = own_chat_template(template, start_end, gap, video)
    else:
        code = chat_template(template, start_end, adds_bos, gap, video)
    (export_folder / FILE).write_text(code, encoding="utf-8")


def lacks_tokenizer(folder: Path, export_folder: Path) -> bool:
    if not has_tokenizer(folder):
        log().warning("%s has no tokenizer, so %s gets none; put one there before you use it", folder, export_folder)
    return not has_tokenizer(folder)


def update_config(export_folder: Path, **values: Any) -> None:
    path = export_folder / "tokenizer_config.json"
    path.write_text(json.dumps(read_json(path) | values, indent=2) + "\n")


def leave_bos_out(export_folder: Path) -> None:
    """Change the exported tokenizer so that transformers adds no BOS token: remove the post-processor from
    `tokenizer.json`, as transformers ignores `add_bos_token=false`."""
    path = export_folder / "tokenizer.json"
    frozen = read_json(path, largest=LARGE)
    if (frozen.get("post_processor") or {}).get("type") == "TemplateProcessing":
        path.write_text(json.dumps(frozen | {"post_processor": None}, ensure_ascii=False))
    update_config(export_folder, add_bos_token=False)


def from_file(folder: Path) -> Any:
    """Open a folder's `tokenizer.json` unchanged as transformers' tokenizer. The tokenizer class that the folder names
    is not used, since some classes change its contents."""
    return PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def keep_llama(folder: Path, export_folder: Path) -> None:
    """Copy the SentencePiece model (`tokenizer.model`) of a Llama tokenizer from `folder` to the export
    `export_folder`, and set those values in `tokenizer_config.json` that transformers 5 does not write there."""
    old, path = read_optional(folder / "tokenizer_config.json"), export_folder / "tokenizer_config.json"
    config = {**read_optional(path), "legacy": is_legacy(old), "add_bos_token": old.get("add_bos_token", True)}
    config["tokenizer_class"] = old.get("tokenizer_class", "LlamaTokenizer")
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    copy_sentencepiece(folder, export_folder, added_tokens(folder, old))


def copy_sentencepiece(folder: Path, export_folder: Path, added: dict[str, int]) -> None:
    shutil.copyfile(folder / "tokenizer.model", export_folder / "tokenizer.model")
    if added:
        (export_folder / "added_tokens.json").write_text(json.dumps(added) + "\n")


def check_template(
    folder: Path,
    export_folder: Path,
    language: PretrainedConfig,
    template_name: str,
    start_end: bool,
    tokens: ImageTokens | None = None,
) -> None:
    """Compare the token ids that the chat template of an exported model gives with those of training, and log a warning
    if they differ. A difference is no error, since llava_fsdp's own programs do not use the chat template. The exported
    folder must have all its files except the weights and `generation_config.json`.

    Without `tokens`, which computes the tokens that training gives an image, conversations with images are not
    compared. Raises ModelError if transformers cannot read the written tokenizer.
    """
    if not has_tokenizer(folder):
        return
    ours = open_tokenizer(folder, language.vocab_size)
    template = open_template(template_name, folder, ours)
    with library_errors(f"{export_folder}: transformers cannot read the tokenizer that was written"):
        differs = first_conversation_with_other_ids(export_folder, ours, template, start_end)
        if differs is None and tokens is not None and can_load_processor(export_folder):
            differs = first_image_conversation_with_other_ids(export_folder, ours, template, start_end, tokens)
    if differs is not None:
        log().warning(
            "the export's chat template for the tokenizer of %s gives other token ids than training: %s; "
            "use the exported model with llava-fsdp chat and llava-fsdp evaluate", folder, differs,
        )  # fmt: skip


def can_load_processor(export_folder: Path) -> bool:
    """Return whether an exported folder has a processor for images that transformers can load here. One that also takes
    videos needs torchvision."""
    is_video = (export_folder / VIDEO_FILE).is_file()
    return (export_folder / "processor_config.json").is_file() and (not is_video or is_torchvision_available())


def check_image_tokens(export_folder: Path, size: Size, expected: int) -> None:
    """Check that transformers' processor gives an image of this size in pixels the expected number of tokens, that of
    training. A processor that also takes videos needs torchvision, and is not checked without it. Raises ModelError if
    the processor cannot be loaded, or gives another number."""
    if not can_load_processor(export_folder):
        log().info("the export's processor is not checked, because its video part needs torchvision")
        return
    with library_errors("transformers cannot use the processor that an export of this model would have"):
        processor: Any = AutoProcessor.from_pretrained(export_folder, trust_remote_code=False, local_files_only=True)
        ids = processor(text=IMAGE_TAG, images=Image.new("RGB", size))["input_ids"][0]
        actual = ids.count(processor.tokenizer.convert_tokens_to_ids(IMAGE_TAG))
    if actual != expected:
        raise ModelError(
            f"the processor of an export would give an image {actual} tokens, and training gives it {expected}; set "
            "export.enabled=false to train without an export"
        )


def write_llama(export_folder: Path, legacy: bool) -> None:
    """Change the `tokenizer.json` of an exported Llama tokenizer so that it gives the same token ids as the
    SentencePiece model, and name a class in `tokenizer_config.json` with which transformers loads it unchanged.

    transformers 5 writes the same `tokenizer.json` for both values of `legacy` and leaves the difference to the
    tokenizer class, which for a LLaVA model is another one than for a Llama model. With `legacy`, every piece of text
    between special tokens begins with one `▁`; without, only the whole text does.
    """
    path = export_folder / "tokenizer.json"
    frozen = read_json(path, largest=LARGE)
    begin = {"type": "Prepend", "prepend": SPACE}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    first = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
    frozen["normalizer"] = {"type": "Sequence", "normalizers": [begin, spaces]} if legacy else None
    frozen["pre_tokenizer"] = None if legacy else first
    for token in frozen["added_tokens"]:
        token["normalized"] = False  # a normalized token is only found with a `▁` before it
    path.write_text(json.dumps(frozen, ensure_ascii=False))
    update_config(export_folder, tokenizer_class="PreTrainedTokenizerFast")


def check_same_ids(folder: Path, export_folder: Path, vocab_size: int, same_bos: bool = True) -> None:
    """Raise ModelError if an exported tokenizer gives other token ids for test texts than the tokenizer of training or,
    with `same_bos`, has another BOS token."""
    trained, written = open_tokenizer(folder, vocab_size), open_tokenizer(export_folder, vocab_size)
    specials = "".join(text for text in ("<s>", "</s>", "<im_start>", "<im_end>") if trained.special(text) is not None)
    for text in (*PROBES, f"a{specials}USER: b", f"{specials} c"):
        ids = [[t.id for t in tokenizer.encode(text)] for tokenizer in (trained, written)]
        if ids[0] != ids[1] or (same_bos and trained.bos != written.bos):
            raise ModelError(f"{export_folder} was written, but its tokenizer makes {ids[1]} of {text!r}, not {ids[0]}")


def write_preprocessor(
    folder: Path, export_folder: Path, pads: bool, grid_pinpoints: list[list[int]] | None = None
) -> None:
    """Write `preprocessor_config.json`, the image preprocessing for transformers, from that in the vision tower's
    folder. `grid_pinpoints` are sizes [height, width] in pixels that images are fitted into before they are cut into
    square tiles; None: an image is one tile."""
    ours = read_preprocessor(folder)
    square = {"height": ours.size, "width": ours.size}
    kind = preprocessor_fields(folder).get("image_processor_type", "CLIPImageProcessor")
    if kind.startswith(("LlavaImage", "LlavaNextImage", "GotOcr2Image")):  # they pad or cut tiles by default
        kind = "CLIPImageProcessor" if ours.keep_ratio else "SiglipImageProcessor"
    images = {
        "processor_class": "LlavaProcessor",
        "image_processor_type": "LlavaImageProcessor" if pads else kind,
        "do_convert_rgb": True,
        "do_pad": pads,
        "do_resize": True,
        "size": {"shortest_edge": ours.size} if ours.keep_ratio else square,
        "resample": int(ours.resample),
        "do_center_crop": ours.keep_ratio,  # transformers' LLaVA processor crops to 224 by default
        "crop_size": square,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(ours.mean),
        "image_std": list(ours.std),
    }
    if grid_pinpoints is not None:
        images |= {
            "processor_class": "LlavaNextProcessor",
            "image_processor_type": "LlavaNextImageProcessor",
            "do_pad": True,  # adds empty tiles to images that have fewer tiles than others of the batch
            "resample": int(Image.Resampling.BICUBIC),  # as tiles are cut in training, with every vision tower
            "image_grid_pinpoints": grid_pinpoints,
        }
    (export_folder / "preprocessor_config.json").write_text(json.dumps(images, indent=1) + "\n")


def write_processor(
    folder: Path,
    export_folder: Path,
    config: LlavaConfig | LlavaNextConfig | LlavaOnevisionConfig | InternVLConfig,
    pads: bool,
    tokens: int,
) -> None:
    """Write the files with which transformers prepares images and prompts: `preprocessor_config.json`,
    `processor_config.json` and with LLaVA-OneVision `video_preprocessor_config.json`. If the vision tower's folder has
    no image preprocessing, only log a warning. `tokens`: image tokens of a tile, which is an input of the tower.

    An InternVL model gets a LlavaProcessor too, with patches as wide as the squares of patches that its projector
    joins: InternVL's own processor needs torchvision, and puts two tokens around every image, unlike training.
    """
    if not preprocessor_fields(folder):
        log().warning("%s has no preprocessor_config.json, so the exported model gets none", folder)
        return
    if isinstance(config, LlavaOnevisionConfig):
        write_onevision(folder, export_folder, config, tokens)
        return
    grids = config.image_grid_pinpoints if isinstance(config, LlavaNextConfig) else None
    write_preprocessor(folder, export_folder, pads, grids)
    vision: Any = config.vision_config
    patch = patch_size(vision)
    if isinstance(config, InternVLConfig):
        patch *= round(1 / config.downsample_ratio)
    grid = (image_size(vision) // patch) ** 2
    # with "default" the processor subtracts a CLS token from the number of tokens, which is added here
    cls = config.vision_feature_select_strategy == "default"
    processor = {
        "processor_class": "LlavaProcessor" if grids is None else "LlavaNextProcessor",
        "patch_size": patch,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
        "num_additional_image_tokens": tokens + cls - grid,
        "image_token": IMAGE_TAG,
    }
    (export_folder / "processor_config.json").write_text(json.dumps(processor, indent=1) + "\n")


def write_onevision(folder: Path, export_folder: Path, config: LlavaOnevisionConfig, tokens: int) -> None:
    """Write the files with which transformers' LlavaOnevisionProcessor prepares images, videos and prompts. They are
    written without transformers, whose video processor needs torchvision. `folder` has the vision tower's image
    preprocessing, and `tokens` is the number of image tokens of a tile (an input of the vision tower)."""
    ours = read_preprocessor(folder)
    common = {
        "processor_class": "LlavaOnevisionProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": ours.size, "width": ours.size},
        "resample": int(Image.Resampling.BICUBIC),  # as tiles are cut in training, with every vision tower
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(ours.mean),
        "image_std": list(ours.std),
    }
    images = {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "do_pad": True,  # adds empty tiles to images that have fewer tiles than others of the batch
        "image_grid_pinpoints": config.image_grid_pinpoints,
    }
    videos = {
        "video_processor_type": "LlavaOnevisionVideoProcessor",
        "do_sample_frames": False,
        "return_metadata": False,
    }
    processor = {
        "processor_class": "LlavaOnevisionProcessor",
        "num_image_tokens": tokens,
        "vision_feature_select_strategy": "full",  # `num_image_tokens` is already without a CLS token
        "vision_aspect_ratio": config.vision_aspect_ratio,
        "image_token": IMAGE_TAG,
        "video_token": VIDEO_TAG,
    }
    (export_folder / "preprocessor_config.json").write_text(json.dumps(common | images, indent=1) + "\n")
    (export_folder / VIDEO_FILE).write_text(json.dumps(common | videos, indent=1) + "\n")
    (export_folder / "processor_config.json").write_text(json.dumps(processor, indent=1) + "\n")


def convert_tokenizer_to_original(folder: Path, export_folder: Path, vocab_size: int, max_length: int) -> None:
    """Write the tokenizer of `folder` into the export folder `export_folder`, for the original LLaVA (transformers
    4.37), with texts of at most `max_length` tokens. Tokens with ids of `vocab_size` or more are left out."""
    if lacks_tokenizer(folder, export_folder):
        return
    old = read_optional(folder / "tokenizer_config.json")
    kept = ("bos_token", "eos_token", "unk_token", "add_bos_token", "add_eos_token", "clean_up_tokenization_spaces")
    config = {key: old[key] for key in kept if key in old}
    config |= {"model_max_length": max_length, "padding_side": "right", "legacy": is_legacy(old)}
    config["pad_token"] = old.get("unk_token") or old.get("eos_token")
    if (folder / "tokenizer.model").is_file():
        config["tokenizer_class"] = "LlamaTokenizer"
        config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
        config["pad_token"] = config["unk_token"]
        added = added_tokens(folder, old).items()
        copy_sentencepiece(folder, export_folder, {text: number for text, number in added if number < vocab_size})
    else:
        frozen = as_older_release(read_json(folder / "tokenizer.json", largest=LARGE), vocab_size)
        (export_folder / "tokenizer.json").write_text(json.dumps(frozen, ensure_ascii=False))
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (export_folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    check_same_ids(folder, export_folder, vocab_size)


def as_older_release(contents: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Convert the contents of a tokenizer.json, in place, for version 0.15 of the tokenizers library: each merge of two
    tokens is one string, and tokens with ids of `vocab_size` or more are removed."""
    contents["added_tokens"] = [t for t in contents.get("added_tokens", []) if t["id"] < vocab_size]
    merges = contents["model"].get("merges")
    if merges and isinstance(merges[0], list) and not any(" " in part for pair in merges for part in pair):
        contents["model"]["merges"] = [" ".join(pair) for pair in merges]
    newer = ["ignore_merges"] if contents["model"].get("ignore_merges") else []
    for part in metaspaces(contents):
        part.setdefault("add_prefix_space", part.get("prepend_scheme", "always") != "never")
        newer += ["Metaspace without split"] if part.get("split") is False else []
    if newer:
        log().warning("the tokenizer has %s, which transformers 4.37 does not know: ids may differ there", newer[0])
    return contents


def metaspaces(tree: Any) -> list[dict[str, Any]]:
    """Return every component of type Metaspace (which writes spaces as `▁`) in a tokenizer.json or a part of it."""
    if isinstance(tree, list):
        return [space for part in tree for space in metaspaces(part)]
    if not isinstance(tree, dict):
        return []
    parts = [part for key, part in tree.items() if key not in ("vocab", "merges")]
    return ([tree] if tree.get("type") == "Metaspace" else []) + metaspaces(parts)
