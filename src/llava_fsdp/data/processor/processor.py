"""A processor of transformers: it replaces the placeholders of images and videos in a text by their tokens, and makes
the inputs of the vision part.

The processor of a model is the authority on both. What it does to a text is learnt by running it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from llava_fsdp.data.records.clip import Clip, Shape
from llava_fsdp.data.text.tokens.tokenizer import read_optional
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.safe_load import library_errors, refuse_model_code

FILES = ("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json")
"""Files in which a model folder could name Python code of its own."""
SETTINGS = ("preprocessor_config.json", "processor_config.json")
NEEDS = "pip install 'llava-fsdp[any]'"
TYPES = "token_type_ids"
"""Ending of the names of the processor's outputs that say of each token what it stands for, such as
`mm_token_type_ids`."""
FAILURES = (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError, AttributeError)
"""Exceptions by which a processor says that it cannot prepare something."""
SMALL_VIDEO = (224, 168)
"""Width and height in pixels of the videos with which a processor is tried."""
MARK = "\ue004"
"""Stands between two placeholders in a text: a private-use character, which no processor writes."""
TEXT_OUTPUTS = ("input_ids", "attention_mask", "labels", "offset_mapping", "text_replacement_offsets")


class VideoNeeds(Enum):
    """What a processor must have of a video to make its tokens."""

    shape = "the number and the size of its frames"
    values = "also values of pixels, whatever they are"
    content = "also what the frames show"


class Recorder:
    """Stands in the place of a processor's tokenizer, and remembers the text that it was last called with: the text in
    which the processor has replaced the placeholders of images."""

    def __init__(self, tokenizer: Any):
        self.inner = tokenizer
        self.last: Any = None

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet, while a copy is made
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.last = text
        return self.inner(text, *args, **kwargs)


@dataclass(frozen=True)
class Processed:
    """What a processor makes of texts with images."""

    ids: list[np.ndarray]
    """Token ids of each text, int64 [length]."""
    types: list[dict[str, torch.Tensor]]
    """For each text, the types of its tokens by their names, int64 [length]."""
    pixels: dict[str, torch.Tensor]
    """The inputs of the vision part for all images and videos together, by the processor's names; floats are
    float32."""


@dataclass(frozen=True)
class Processor:
    """The processor in a model's folder. A process opens it when it first needs it, so that copies for other processes
    are small."""

    folder: Path

    def __reduce__(self) -> tuple:
        return Processor, (self.folder,)

    @cached_property
    def opened(self) -> Any:
        """The processor of transformers. A Recorder takes the place of its tokenizer: it calls the tokenizer, and
        remembers the text, in which the processor has replaced the placeholders of images."""
        from transformers import AutoProcessor

        processor = AutoProcessor.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        tokenizer = processor.tokenizer
        if tokenizer.pad_token is None:  # the texts of a row are padded, and cut to their lengths again
            tokenizer.pad_token = tokenizer.eos_token
        processor.tokenizer = Recorder(tokenizer)
        return processor

    @cached_property
    def media_ids(self) -> tuple[int, ...]:
        """Ids of tokens whose embeddings vision features replace: that of images and, if there is one, of videos."""
        from transformers import AutoConfig

        config: Any = AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        image, video = (
            next(
                (
                    token_id
                    for end in ("id", "index")
                    if (token_id := getattr(config, f"{kind}_token_{end}", None)) is not None
                ),
                None,
            )
            for kind in ("image", "video")
        )
        if image is None:
            raise ModelError(f"{self.folder / 'config.json'} names no image_token_id, the id of the tokens of images")
        return (image,) if video is None else (image, video)

    @property
    def takes_videos(self) -> bool:
        return getattr(self.opened, "video_processor", None) is not None

    @cached_property
    def image_names(self) -> frozenset[str]:
        """The names of the inputs that images become."""
        return frozenset(self.opened.image_processor.model_input_names)

    @cached_property
    def shares_inputs(self) -> bool:
        """Whether images and videos become inputs of the same names, so that a call can have only one of both."""
        return self.takes_videos and not self.image_names.isdisjoint(self.opened.video_processor.model_input_names)

    @cached_property
    def shares_tokens(self) -> bool:
        """Whether the tokens of a video are those of images, so that a sample can have only one of both: a model could
        not tell which are whose."""
        # tried with a small video; the first of `media_ids` is the token of images
        clip = Clip(SMALL_VIDEO, 4, 2.0, tuple(range(4)))
        (text,) = self.expand([self.opened.video_token], [clip])
        return bool((self.tokenize(text) == self.media_ids[0]).any())

    @cached_property
    def needs(self) -> VideoNeeds:
        """The least that the processor must have of a video to make its tokens. It is found by a trial with two small
        videos of unlike lengths: what is enough gives the same text as the whole frames. Raises one of FAILURES if the
        processor cannot prepare the videos together."""
        dice, (width, height) = np.random.default_rng(0), SMALL_VIDEO
        noise = [dice.integers(0, 256, (frames, height, width, 3), np.uint8) for frames in (4, 6)]
        clips = [
            Clip(SMALL_VIDEO, len(frames), 2.0, tuple(range(len(frames))), lambda frames=frames: frames)
            for frames in noise
        ]
        places = [self.opened.video_token] * len(clips)
        expected = self.expanded(places, clips, VideoNeeds.content)
        for needs in (VideoNeeds.shape, VideoNeeds.values):
            with contextlib.suppress(*FAILURES):
                if self.expanded(places, clips, needs) == expected:
                    return needs
        return VideoNeeds.content

    @cached_property
    def fingerprint(self) -> str:
        """Text that changes with every setting of the processor."""
        settings = [read_optional(self.folder / name) for name in SETTINGS]
        parts = [type(self.opened).__name__, type(self.opened.image_processor).__name__, *self.media_ids]
        return hashlib.sha256(json.dumps([*settings, *parts], sort_keys=True).encode()).hexdigest()[:32]

    def expand(self, placeholders: Sequence[str], shapes: Sequence[Shape]) -> list[str]:
        """Return what the processor writes in the place of each placeholder of one sample. `shapes`: what is known of
        the image or video of each.

        Tokens are assumed to depend on sizes alone, so black images of the same sizes are prepared; a sample whose real
        images give other ids is an error later. `needs` is the least of a video on which its tokens depend. It is found
        by a trial at its first use, so it is not asked for without videos."""
        has_videos = any(isinstance(shape, Clip) for shape in shapes)
        return self.expanded(placeholders, shapes, self.needs if has_videos else VideoNeeds.shape)

    def expanded(self, placeholders: Sequence[str], shapes: Sequence[Shape], needs: VideoNeeds) -> list[str]:
        """Return what the processor writes in the place of each placeholder of one sample. Black images are prepared in
        place of the images. `shapes`: what is known of the image or video of each placeholder; `needs`: what the
        processor is given of videos."""
        images = [Image.new("RGB", shape) for shape in shapes if not isinstance(shape, Clip)]
        videos = [(frames_of(shape, needs), shape) for shape in shapes if isinstance(shape, Clip)]
        # MARK is a character that no processor writes, so that the text can be split again
        self([MARK.join(placeholders)], [images], videos)
        last = self.opened.tokenizer.last  # the text with which the processor has called its tokenizer
        return (last if isinstance(last, str) else last[0]).split(MARK)

    def tokenize(self, text: str) -> np.ndarray:
        """Return the token ids of a text without images, int64 [length]."""
        found = self.opened.tokenizer(text, add_special_tokens=self.adds_special(text))["input_ids"]
        return np.array(found, dtype=np.int64)

    def tokens_of(self, ids: np.ndarray) -> list[str]:
        """Return the tokens of token ids as their vocabulary has them."""
        return self.opened.tokenizer.convert_ids_to_tokens(ids.tolist())

    def adds_special(self, text: str) -> bool:
        """Return whether the tokenizer adds its special tokens to a text: unless the chat template has written the BOS
        token (transformers processing_utils.py, `apply_chat_template`)."""
        bos = self.opened.tokenizer.bos_token
        return bos is None or not text.startswith(bos)

    def __call__(
        self,
        texts: Sequence[str],
        images: Sequence[Sequence[Image.Image]],
        videos: Sequence[tuple[torch.Tensor, Clip]] = (),
    ) -> Processed:
        """Prepare the texts, images and videos of some samples, each with at least one image or video. Return the token
        ids of each text, their types, and the inputs of the vision part. All texts get the tokenizer's special tokens,
        or none, as `adds_special` says of the first one.

        Args:
            images: the images of each sample.
            videos: the videos of all samples, in the order of their placeholders: the used frames, uint8 [frames, 3,
                height, width], and what is known of the file.
        """
        given_images = [list(images_of_sample) for images_of_sample in images if images_of_sample]
        shown: dict[str, Any] = {"images": given_images} if given_images else {}
        if videos:
            shown |= {
                "videos": [frames for frames, _ in videos],
                "video_metadata": [metadata_of(clip) for _, clip in videos],
                "do_sample_frames": False,
            }
        made = self.opened(
            text=list(texts),
            **shown,
            padding=True,
            return_tensors="pt",
            add_special_tokens=self.adds_special(texts[0]),
        )
        mask = made["attention_mask"].bool()
        names = [name for name in made if name.endswith(TYPES)]
        return Processed(
            [row[is_token].numpy() for row, is_token in zip(made["input_ids"], mask, strict=True)],
            [{name: made[name][row][is_token] for name in names} for row, is_token in enumerate(mask)],
            {
                name: values.float() if values.is_floating_point() else values
                for name, values in made.items()
                if name not in TEXT_OUTPUTS and not name.endswith(TYPES) and isinstance(values, torch.Tensor)
            },
        )


def frames_of(clip: Clip, needs: VideoNeeds) -> torch.Tensor:
    """Return the frames from which a processor makes the tokens of a video, uint8 [frames, 3, height, width]. By what
    it needs, these are the real frames, black ones, or tensors on the meta device, which have a shape but no values."""
    if needs is VideoNeeds.content and clip.read is not None:
        return as_tensor(clip.read())
    device = "meta" if needs is VideoNeeds.shape else "cpu"
    return torch.zeros((len(clip.numbers), 3, *clip.size[::-1]), dtype=torch.uint8, device=device)


def as_tensor(frames: np.ndarray) -> torch.Tensor:
    """Return the frames of a video, uint8 [frames, height, width, 3], with the channels first, as a processor gets
    them: the last axis could be taken for channels if it were a width."""
    return torch.from_numpy(frames).permute(0, 3, 1, 2)


def metadata_of(clip: Clip) -> Any:
    """Return transformers' description of a video whose used frames were chosen before. Each call makes a new one,
    because processors change it."""
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(
        total_num_frames=clip.frames,
        fps=clip.rate,
        width=clip.size[0],
        height=clip.size[1],
        duration=clip.frames / clip.rate,
        frames_indices=np.array(clip.numbers),  # pyright: ignore[reportArgumentType]  # as transformers' readers do
    )


def open_processor(folder: Path) -> Processor:
    """Open transformers' processor in a model's folder.

    Raises:
        ModelError: it cannot be opened, needs files or packages that are missing, or its files name Python code.
    """
    for name in FILES:
        refuse_model_code(read_optional(folder / name), folder / name)
    if not any((folder / name).is_file() for name in SETTINGS):
        raise ModelError(
            f"{folder} has no {' or '.join(SETTINGS)}, so no image can be prepared: copy the files of the model's "
            "processor from its makers; transformers' processor.save_pretrained writes them"
        )
    processor = Processor(folder)
    lacks = importlib.util.find_spec("torchvision") is None
    why = f": most processors need torchvision, which is not installed; {NEEDS}" if lacks else ""
    with library_errors(f"{folder}: transformers cannot open the processor of this model{why}"):
        opened = processor.opened
        if not hasattr(opened, "image_processor"):
            raise ModelError(
                f"{folder}: its processor prepares no images; copy preprocessor_config.json from the model"
            )
        _ = processor.media_ids  # fails here, and not later, if config.json has no id of image tokens
    return processor
