"""Ask a trained model: what `chat` and `evaluate` share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from llava_fsdp.config import AspectRatio
from llava_fsdp.data.conversation import prompt
from llava_fsdp.data.encode import encode_prompt
from llava_fsdp.data.images import Preprocessor, load_image, read_preprocessor
from llava_fsdp.data.loader import normalize
from llava_fsdp.data.source import Turn
from llava_fsdp.data.templates import IMAGE_TAG, Template, template
from llava_fsdp.data.tokenizer import Tokenizer, open_tokenizer
from llava_fsdp.data.vocabulary import IMAGE_ID
from llava_fsdp.errors import DataError, ModelError
from llava_fsdp.model.files import open_tensors
from llava_fsdp.model.original import is_original
from llava_fsdp.model.parts import NOTES, read_json, read_llava_config, resolve_model
from llava_fsdp.proof import load_llava, quiet_transformers
from llava_fsdp.untrusted import foreign


@dataclass(frozen=True)
class Question:
    """A conversation that ends with a question, and its pictures."""

    turns: list[Turn]
    """Image tags stand in the text where the pictures go."""
    images: list[Path]
    where: str
    """What a message about a picture calls this question."""


class Assistant:
    """An exported model with its tokenizer, its pictures' preprocessing and its conversation template."""

    def __init__(self, checkpoint: str, form: str, aspect: AspectRatio):
        """Load a run's export, or any folder that LlavaForConditionalGeneration loads.

        Args:
            form: the template for a folder that does not say its own; likewise `aspect`.

        Raises:
            ModelError: there is no model, or one in the original's format.
        """
        folder = resolve_model(checkpoint, "model.checkpoint")
        raw = read_json(folder / "config.json", f"model.checkpoint={checkpoint}")
        if is_original(raw) and raw.get("image_aspect_ratio") == AspectRatio.anyres.value:
            raise ModelError(
                f"model.checkpoint={checkpoint} is a model of tiles (anyres), which transformers' LLaVA has not; "
                "the original's own programs read this folder"
            )
        if is_original(raw):
            raise ModelError(
                f"model.checkpoint={checkpoint} is in the original LLaVA's format; turn it into transformers' first: "
                f"python -m llava_fsdp.export source={checkpoint} to=FOLDER"
            )
        notes = read_json(folder / NOTES, f"model.checkpoint={checkpoint}") if (folder / NOTES).is_file() else {}
        with foreign(f"{folder / NOTES} is not what an export writes"):
            self.form: Template = template(notes.get("template", form))
            self.start_end = bool(notes.get("image_start_end", False))
            self.aspect = AspectRatio(notes.get("image_aspect_ratio", aspect.value))
        self.preprocessor: Preprocessor = read_preprocessor(folder)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        read_llava_config(folder, "model.checkpoint")
        open_tensors(folder)  # refuses what carries a program, in our words
        with quiet_transformers(), foreign(f"model.checkpoint={checkpoint} cannot be loaded"):
            model = load_llava(folder, "auto")
        self.model = model.to(self.device).eval()
        rows = notes.get("vocab_size", self.model.config.image_token_id)
        self.tokenizer: Tokenizer = open_tokenizer(folder, rows)
        self.table = torch.from_numpy(self.preprocessor.pixel_table()).to(self.device)

    @torch.no_grad()
    def answers(self, questions: list[Question], max_new_tokens: int, blank: bool = False) -> list[str]:
        """The greedy answer to every question.

        Args:
            blank: show pictures of the mean colour instead.

        Raises:
            DataError: a picture cannot be read.
        """
        config = self.model.config
        prompts = [self.ids(q) for q in questions]
        length = max(len(p) for p in prompts)
        ids = torch.zeros((len(prompts), length), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(prompts):  # padded on the left: all answers begin at the same position
            ids[row, length - len(tokens) :] = torch.where(tokens == IMAGE_ID, config.image_token_id, tokens)
            mask[row, length - len(tokens) :] = 1
        images = self.pictures(questions, blank)
        shown = {"pixel_values": images} if len(images) else {}
        output = self.model.generate(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            **shown,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=self.stops(),
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([Ended(self, length)]),
        )
        return [self.text(row[length:].tolist()) for row in output]

    def ids(self, question: Question) -> torch.Tensor:
        tags = sum(turn.text.count(IMAGE_TAG) for turn in question.turns if turn.role == "human")
        if question.images and tags != len(question.images):
            raise DataError(f"{question.where}: {tags} {IMAGE_TAG} tags for {len(question.images)} pictures")
        text = prompt(question.turns, self.form, self.start_end, bool(question.images))
        positions = [self.model.config.image_seq_length] * len(question.images)
        return torch.from_numpy(encode_prompt(text, self.tokenizer, positions))

    def pictures(self, questions: list[Question], blank: bool) -> torch.Tensor:
        """[pictures, 3, size, size] in the model's dtype."""
        loaded = [
            torch.from_numpy(load_image(path, self.preprocessor, self.aspect, q.where))
            for q in questions
            for path in q.images
        ]
        if not loaded:
            return torch.zeros(0)
        values = normalize(torch.stack(loaded).to(self.device), self.table).to(self.model.dtype)
        return torch.zeros_like(values) if blank else values

    def stops(self) -> list[int]:
        """Ids that end an answer: the model's end of sequence, and the template's where it is one token."""
        end = self.model.generation_config.eos_token_id
        stops = set(end if isinstance(end, list) else [end]) - {None}
        last = self.tokenizer.encode(self.form.stop)
        return sorted(stops | ({last[-1].id} if len(last) == 1 else set()))

    def text(self, ids: list[int]) -> str:
        for position, token in enumerate(ids):
            if token in self.stops():
                ids = ids[:position]
                break
        return self.tokenizer.decode(ids).partition(self.form.stop)[0].strip()

    def has_ended(self, ids: list[int]) -> bool:
        """Whether the template's end of an answer has been written, which may take several tokens."""
        return bool(set(ids) & set(self.stops())) or self.form.stop in self.tokenizer.decode(ids)


class Ended(StoppingCriteria):
    """Every row has ended its answer."""

    def __init__(self, assistant: Assistant, begin: int):
        self.assistant = assistant
        self.begin = begin

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        ended = [self.assistant.has_ended(row[self.begin :].tolist()) for row in input_ids]
        return torch.tensor(ended, device=input_ids.device)
