"""Find the parameters of a whole model on which no loss depends, such as an image generator or the last block of a
vision tower whose output is not taken, and freeze them."""

import numpy as np
import torch

from llava_fsdp.config import PrecisionConfig
from llava_fsdp.data.batching.collate import image_inputs
from llava_fsdp.data.loader import Loader
from llava_fsdp.data.processor.encoder import ProcessorEncoder
from llava_fsdp.data.processor.inputs import kind_of
from llava_fsdp.data.text.chat_template.message_parts import VIDEO
from llava_fsdp.data.text.conversation import Segment
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.plan.memory.reached import LARGE, reached
from llava_fsdp.runtime.files.safe_load import library_errors
from llava_fsdp.runtime.text.log import log


def freeze_unused(model: Architecture, loader: Loader, precision: PrecisionConfig) -> None:
    """Freeze the trainable parameters of a meta-device model on which no loss depends, whatever a sample's image or
    video is. Black ones, small and large, are tried. Does nothing for models without a processor.

    Raises:
        ConfigError: such a model cannot compute with the dtypes of its weights.
        ModelError: its class in transformers cannot run on the meta device with an image, or with a video of the data.
    """
    reader, encoder = loader.steps.image_reader, loader.steps.encoder
    if not isinstance(encoder, ProcessorEncoder):
        return
    image = Segment(encoder.placeholder(LARGE), supervised=False, image=0)
    large = encoder.encode([image], ["large"], [LARGE], "a large image"), [np.zeros((*LARGE[::-1], 3), np.uint8)]
    used: set[str] = set()
    blanks = encoder.blanks(loader.steps.records.has_videos).values()
    for sample, images in (*blanks, large):
        ids = sample.input_ids[None]
        given = image_inputs(reader).collate([(sample, images)], ids)
        kind = "video" if kind_of(images[0]) == VIDEO else "image"
        tried = (
            f"transformers' class of this model fails with a black {kind}, without weights (on torch's meta device), "
            "in bf16, and with the tensors alone of what its processor makes"
        )
        with library_errors(f"{encoder.processor.folder}: which parameters train is not known, because {tried}"):
            used |= reached(model, torch.from_numpy(ids), given, precision)
    unused = {name for name, p in model.named_parameters() if p.requires_grad} - used
    if unused:
        log().info(
            "%d parameters are frozen, because no loss depends on them: %s%s",
            len(unused), min(unused), " and others" if len(unused) > 1 else "",
        )  # fmt: skip
    model.unused = model.unused | unused
    model.freeze()
