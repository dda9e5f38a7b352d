"""What stands beside an exported model's weights, so that transformers makes the ids and pixels of training."""

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, LlavaConfig

from llava_fsdp.config import AspectRatio, Config
from llava_fsdp.data.images import read_preprocessor
from llava_fsdp.data.templates import IMAGE_TAG, Template, template
from llava_fsdp.data.tokenizer import Tokenizer, open_tokenizer
from llava_fsdp.log import log

PAD_TOKEN = "<pad>"
ROW_MULTIPLE = 64


def write_tokenizer(folder: Path, staged: Path, vocab_size: int, cfg: Config) -> tuple[int, int, int]:
    """The tokenizer with an image tag and a padding token; returns their ids and the vocabulary rows needed.

    As the hub's LLaVA conversion: new ids follow the old ones, and rows are padded to a multiple of 64. A language
    model with rows to spare keeps its size.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.add_tokens([IMAGE_TAG], special_tokens=True)
    if tokenizer.pad_token is None or tokenizer.pad_token == tokenizer.unk_token:
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
    gap = gap_after_image(tokenizer, open_tokenizer(folder, vocab_size))
    tokenizer.chat_template = chat_template(template(cfg.data.template), gap)
    tokenizer.save_pretrained(staged)
    if (folder / "tokenizer.model").is_file():
        shutil.copyfile(folder / "tokenizer.model", staged / "tokenizer.model")
    image_id, pad_id = tokenizer.convert_tokens_to_ids(IMAGE_TAG), tokenizer.pad_token_id
    needed = max(image_id, pad_id) + 1
    rows = vocab_size if needed <= vocab_size else -(-needed // ROW_MULTIPLE) * ROW_MULTIPLE
    return image_id, pad_id, rows


def gap_after_image(theirs: Any, ours: Tokenizer) -> str:
    """What must stand between an image tag and the line behind it for transformers to make the ids of training.

    Training tokenizes the text behind a picture by itself, and a Llama tokenizer begins every text with a space.
    transformers tokenizes the whole conversation, where none comes after a special token.
    """
    wanted = [token.id for token in ours.encode("\nx")]
    for gap in ("", " "):
        if theirs(f"{IMAGE_TAG}{gap}\nx", add_special_tokens=False)["input_ids"][1:] == wanted:
            return gap
    log().warning("transformers' tokenizer makes other ids behind a picture than training did; use our chat")
    return ""


def chat_template(form: Template, gap: str) -> str:
    """The conversation template in transformers' Jinja form; pictures stand first in their message."""
    pattern = form.pattern
    before = "{% if loop.first %}" + pattern.first_question + "{% else %}" + pattern.next_question + "{% endif %}"
    question = f"{before}|IMAGES||TEXT|{pattern.after_question}"
    answer = f"{pattern.before_answer}|TEXT|{pattern.after_answer}"
    images = (
        "{% if message['content'] is not string %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}" + IMAGE_TAG + gap + "{{ '\\n' }}{% endif %}{% endfor %}{% endif %}"
    )
    text = (
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
        "{% endif %}"
    )

    def filled(pattern: str) -> str:
        return pattern.replace("\n", "{{ '\\n' }}").replace("|IMAGES|", images).replace("|TEXT|", text)

    return (
        "{% for message in messages %}{% if message['role'] == 'user' %}"
        + filled(question)
        + "{% elif message['role'] == 'assistant' %}"
        + filled(answer)
        + "{% endif %}{% endfor %}"
    )


def write_processor(folder: Path, staged: Path, config: LlavaConfig, cfg: Config) -> None:
    """The tower's own preprocessing, padded to a square where training padded, and LLaVA's processor around it."""
    own = json.loads((folder / "preprocessor_config.json").read_text()).get(
        "image_processor_type", "CLIPImageProcessor"
    )
    ours_read = read_preprocessor(folder)
    square = {"height": ours_read.size, "width": ours_read.size}
    pads = cfg.data.image_aspect_ratio is AspectRatio.pad
    images = {
        "processor_class": "LlavaProcessor",
        "image_processor_type": "LlavaImageProcessor" if pads else own,
        "do_convert_rgb": True,
        "do_pad": pads,
        "do_resize": True,
        "size": {"shortest_edge": ours_read.size} if ours_read.keep_ratio else square,
        "resample": int(ours_read.resample),
        "do_center_crop": ours_read.keep_ratio,  # transformers' LLaVA processor crops to 224 unless told otherwise
        "crop_size": square,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(ours_read.mean),
        "image_std": list(ours_read.std),
    }
    (staged / "preprocessor_config.json").write_text(json.dumps(images, indent=1) + "\n")
    vision: Any = config.vision_config
    grid = (vision.image_size // vision.patch_size) ** 2
    default = config.vision_feature_select_strategy == "default"
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": vision.patch_size,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
        "num_additional_image_tokens": 1 if default else config.image_seq_length - grid,
        "image_token": IMAGE_TAG,
    }
    (staged / "processor_config.json").write_text(json.dumps(processor, indent=1) + "\n")
