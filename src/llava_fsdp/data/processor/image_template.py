"""Open the chat template of a whole model, and learn what it writes for an image and for a video."""

import contextlib
from dataclasses import replace
from pathlib import Path

from llava_fsdp.data.text.chat_template.chat_layout import Unfit
from llava_fsdp.data.text.chat_template.jinja_template import OWN, ChatTemplate, ImageParts, is_own, read_own, unfit
from llava_fsdp.data.text.chat_template.message_parts import IMAGE, VIDEO
from llava_fsdp.data.text.tokens.tokenizer import Tokenizer
from llava_fsdp.runtime.errors import ConfigError

NO_VIDEO = "\ue003video\ue003"
"""Stands for the placeholder of videos if a template writes none: private-use characters, which no template writes."""


def open_image_template(name: str, folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Return a model's own chat template, which gets images and videos as parts of messages. Raise ConfigError if
    `name` (`data.template`) is another one, or the folder has none that can be trained with."""
    if not is_own(name):
        raise ConfigError(
            f"data.template={name}: a model that transformers prepares images for is trained with its own chat "
            f"template; set data.template={OWN}"
        )
    template = replace(read_own(name, folder, tokenizer, "copy it from the model's makers"), parts=True, layouts={})
    path = template.path
    try:
        image, video = learn_placeholder(template, IMAGE), NO_VIDEO
    except Unfit as reason:
        raise ConfigError(f"data.template={name}: the chat template {path} {reason}") from reason
    # a template that writes nothing for a video, or what it writes for an image, can only be trained with images
    with contextlib.suppress(Unfit):
        found = learn_placeholder(template, VIDEO)
        video = NO_VIDEO if found in image or image in found else found
    # `layouts`: what was learnt of the template while it had no placeholders is dropped
    template = replace(template, images=ImageParts(image=image, video=video), layouts={})
    if reason := unfit(template):
        raise ConfigError(f"data.template={name}: the chat template {path} {reason}")
    return template


def learn_placeholder(template: ChatTemplate, kind: str) -> str:
    """Return the text that a template writes for an image or a video, without white space around it: what a second one
    adds to the text before a question. Raise Unfit if that is nothing."""
    # conversations of a question, with one or two images or videos before its text, and an answer; `one` and `two` are
    # what the template writes around the texts, so that their first item ends where the question's text begins
    (_, one), (_, two) = template.order_and_frames(f"h{kind}tg"), template.order_and_frames(f"h{kind}{kind}tg")
    single, double = one[0], two[0]
    same = next((n for n, (a, b) in enumerate(zip(single, double, strict=False)) if a != b), len(single))
    added = double[same : len(double) - len(single) + same]
    if not added.strip() or double != single[:same] + added + single[same:]:
        raise Unfit("does not write the images or videos of a question one after the other")
    return added.strip()
