"""`Parts`: the folders from which a model is read and the configurations in them; and how their JSON files are read."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig

from llava_fsdp.config import Feature
from llava_fsdp.model.logit_change import LogitChange, logit_change
from llava_fsdp.model.vision_tower import image_size
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.safe_load import read_json as read_any_json
from llava_fsdp.runtime.files.safe_load import refuse_model_code


@dataclass(frozen=True)
class Parts:
    """The folders from which a model is read, and the configurations of its language model and vision tower."""

    language_folder: Path
    """Folder of the tokenizer and, if `whole` is None, of the language model's weights."""
    vision_folder: Path
    """Folder of the image preprocessor and, if `whole` is None, of the vision tower's weights."""
    language: PretrainedConfig
    vision: PretrainedConfig
    whole: Path | None
    """Folder of a whole model (`model.checkpoint`); None if language model and vision tower are given separately."""
    trained_feature: Feature | None = None
    """With which tokens of the vision tower `model.checkpoint` was trained: without the CLS token (`patch`) or `full`;
    None without `model.checkpoint`."""
    grid_pinpoints: list[list[int]] | None = None
    """If `model.checkpoint` is a LLaVA-NeXT or LLaVA-OneVision, the sizes [width, height] in pixels into which its
    images were fitted in training; else None."""
    max_tiles: int | None = None
    """If `model.checkpoint` is a LLaVA-OneVision, the `data.max_tiles` with which it was trained; else None."""
    bare_logits: bool = False
    """Whether the logits are the output of the output layer, whatever the language model's class does with it: so it is
    in LLaVA's classes and in those of other vision-language models, from whose folders the weights may come."""

    class_config: PretrainedConfig | None = None
    """The whole configuration of `model.checkpoint`, if it is trained as its class in transformers has it (`Whole`);
    None for LLaVA."""

    is_small_copy: bool = False
    """Whether the configurations are those of a small copy, whose weights are in no file."""

    @property
    def logit_change(self) -> LogitChange:
        """How the logits are made from the output of the output layer."""
        return LogitChange() if self.bare_logits else logit_change(self.language)

    @property
    def image_size(self) -> int:
        """Width and height of the vision tower's input images, in pixels."""
        return image_size(self.vision)


def read_json(path: Path, what: str) -> dict:
    """Read a JSON file of a model folder. Raises ModelError, whose message begins with `what`, if the file contains no
    JSON object, or names Python code in the model folder."""
    try:
        content = read_any_json(path)
        refuse_model_code(content, path)
    except ModelError as error:
        raise ModelError(f"{what}: {error}") from error
    return content
