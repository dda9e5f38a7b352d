"""Load a trained model that answers questions, of whichever kind it is."""

from llava_fsdp.chat.answerer import Answerer
from llava_fsdp.chat.assistant import Assistant
from llava_fsdp.chat.class_assistant import ClassAssistant
from llava_fsdp.chat.open_model import open_model
from llava_fsdp.config import AUTO, AspectRatio
from llava_fsdp.export.source_model import Opened
from llava_fsdp.export.write.whole_folder import WholeSource


def open_assistant(checkpoint: str, opened: Opened | None = None, limited_images: bool = False) -> Answerer:
    """Load a trained model for chatting: a LLaVA as an Assistant, a model of another class of transformers as a
    ClassAssistant. For what a LLaVA's folder does not say: the default conversation template, images padded to squares.

    Args:
        opened: the result of `open_model` for `checkpoint`; None: `open_model` is called here.
        limited_images: whether to read images in another process, with limits on time and memory.

    Raises:
        ConfigError, ModelError, CheckpointError: the model cannot be found or read.
    """
    opened = opened or open_model(checkpoint, AUTO)
    if isinstance(opened.source, WholeSource):
        return ClassAssistant(checkpoint, opened, limited_images=limited_images)
    return Assistant(checkpoint, AUTO, AspectRatio.pad, opened=opened, limited_images=limited_images)
