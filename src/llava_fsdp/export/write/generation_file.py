"""Write the `generation_config.json` of an exported model, and check that transformers' `generate` ends an answer at
every token that ends one. The argument `ends` of functions has the ids of these tokens."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from llava_fsdp.data.processor.image_template import open_image_template
from llava_fsdp.data.text.chat_template.jinja_template import OWN, open_template, stops_of
from llava_fsdp.data.text.chat_template.template_file import find_code
from llava_fsdp.data.text.tokens.detokenize import ends_in_special, eos_ids, find_stops
from llava_fsdp.data.text.tokens.tokenizer import Tokenizer, open_tokenizer, read_optional
from llava_fsdp.export.write.processor import has_tokenizer
from llava_fsdp.model.parts import Parts
from llava_fsdp.model.sources.llava_v1_5_config import write_json
from llava_fsdp.model.sources.pretrained import read_config
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.runtime.files.safe_load import library_errors

FILE = "generation_config.json"
OWN_KEYS = ("eos_token_id", "pad_token_id", "transformers_version", "_from_model_config", "_commit_hash")
"""Keys of a `generation_config.json` that an export does not copy from the language model's file."""
GROUP = 8
"""Number of answers that `check_ends` generates in one batch."""
LONGEST = 4
"""Number of tokens that `check_ends` generates if nothing ends an answer."""


def find_ends(parts: Parts, template_name: str, folders: Iterable[Path] = ()) -> tuple[list[int], str | None]:
    """Return what ends an answer: the ids of tokens, sorted, and a text if it may consist of several tokens, so that no
    token stands for it; None if the tokens are enough.

    The tokens are those where the command `chat` stops. If the conversation template ends an answer with a text that is
    not a special token, `chat` looks for this text; here, each token whose text contains it ends an answer. The
    `generation_config.json` in further `folders` of the model may name more tokens.
    """
    folder, language = parts.language_folder, parts.language
    tokenizer, stop, stops = None, "", ()
    if has_tokenizer(folder):
        tokenizer = open_tokenizer(folder, language.vocab_size)
        template = open_template(template_name, folder, tokenizer)
        stop, stops = template.stop, stops_of(template)
    ends = find_stops(tokenizer, stops, language.eos_token_id, (folder, *folders))
    if tokenizer is None or not stop or ends_in_special(tokenizer, stop):
        return sorted(ends), None
    ends |= tokens_with(tokenizer, stop)
    return sorted(ends), stop if len(stop) > 1 and len(tokenizer.encode(stop)) > 1 else None


def tokens_with(tokenizer: Tokenizer, text: str) -> set[int]:
    """Return the ids of all tokens whose text contains `text`."""
    before = [token.id for token in tokenizer.encode("a")]  # at the beginning of a text, decoding may drop a space
    begin = len(tokenizer.decode(before))
    return {number for number in range(tokenizer.size) if text in tokenizer.decode([*before, number])[begin:]}


def generation_fields(folder: Path, ends: Sequence[int], bos: int | None, pad: int | None) -> dict[str, Any]:
    """Return the contents of a `generation_config.json`: those of the language model's file in `folder`, if there is
    one, such as its temperature, with other special tokens. Raises ModelError if transformers cannot read that file.

    Args:
        ends: ids of the tokens that end an answer.
        bos: id of the token with which a sequence begins, for a folder whose file does not name it.
        pad: id of the padding token.
    """
    given = read_optional(folder / FILE)
    with library_errors(f"{folder / FILE}: transformers cannot read it"):
        GenerationConfig.from_dict(dict(given))
    fields = {"bos_token_id": bos, **{key: value for key, value in given.items() if key not in OWN_KEYS}}
    fields |= {"eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None, "pad_token_id": pad}
    return {key: value for key, value in fields.items() if value is not None}


def ends_of_class(folder: Path, language: Any) -> dict[int, str] | None:
    """Return the tokens at which `chat` ends an answer of a whole model of transformers: {id: name, empty if it is not
    special}, sorted by id. None if there is no chat with the model: its folder lacks a tokenizer or a chat template
    that can be trained with. `language`: configuration of the language model."""
    if find_code(folder) is None or not has_tokenizer(folder):
        return None
    tokenizer = open_tokenizer(folder, language.vocab_size)
    try:
        stops = stops_of(open_image_template(OWN, folder, tokenizer))
    except ConfigError:  # such a model is not trained, and a conversion of it keeps the file
        return None
    ends = sorted(find_stops(tokenizer, stops, language.eos_token_id, (folder,)))
    return {end: tokenizer.name(end) or "" for end in ends}


def ends_of_generate(folder: Path) -> set[int]:
    """Return the ids of the tokens at which transformers' `generate` ends an answer of the model in a folder."""
    if (folder / FILE).is_file():
        return {*eos_ids(read_optional(folder / FILE), folder / FILE)}
    found = GenerationConfig.from_model_config(read_config(folder, "model.checkpoint")).eos_token_id
    return {*found} if isinstance(found, list) else {found} - {None}


def warning_of_unnamed_ends(folder: Path, language: Any) -> str | None:
    """Return a warning if transformers' `generate` goes on after a token at which `chat` ends an answer of the model in
    `folder`, which is trained as its class in transformers; else None. `language`: the text part's configuration."""
    ends = ends_of_class(folder, language)
    lacking = (ends or {}).keys() - ends_of_generate(folder)
    if not ends or not lacking:
        return None
    named = ", ".join(f"{end} ({ends[end]})" if ends[end] else str(end) for end in sorted(lacking))
    return (
        f"{folder / FILE} does not name every token that ends an answer. transformers' generate goes on after {named}. "
        f"The export of this run has a {FILE} with all of them"
    )


def write_generation_of_class(folder: Path, language: Any, export_folder: Path) -> None:
    """Write `generation_config.json` into `export_folder`, the export of a whole model of transformers, and check it.
    Nothing is written if `generate` ends an answer of the model in `folder` where `chat` does.

    Args:
        folder: folder from which the model was read before its training.
        language: configuration of the language model.

    Raises:
        ModelError: `generate` does not end an answer at one of the tokens.
    """
    ends = [*(ends_of_class(folder, language) or ())]
    if not ends or ends_of_generate(folder) == {*ends}:
        return
    pads = (read_optional(folder / FILE).get("pad_token_id"), getattr(language, "pad_token_id", None), ends[0])
    pad = next(number for number in pads if number is not None)
    fields = generation_fields(folder, ends, getattr(language, "bos_token_id", None), pad)
    write_json(export_folder / FILE, fields | {"transformers_version": transformers.__version__})
    check_ends(export_folder, ends, language.vocab_size)


def write_generation(parts: Parts, export_folder: Path, ends: Sequence[int], pad: int, rows: int) -> None:
    """Write `generation_config.json` into `export_folder`, a model folder for transformers, and check it. `ends` are
    the ids of the tokens that end an answer, `pad` is that of the padding token, and `rows` the number of rows of the
    embeddings."""
    fields = generation_fields(parts.language_folder, ends, parts.language.bos_token_id, pad)
    write_json(export_folder / FILE, fields | {"transformers_version": transformers.__version__})
    check_ends(export_folder, ends, rows)


@torch.random.fork_rng(devices=[])
def check_ends(folder: Path, ends: Collection[int], rows: int) -> None:
    """Check that transformers' `generate` ends an answer at each of the tokens that end one, and that the folder names
    no other token. A model with one small layer writes the answers, each of which is prescribed. A token beyond the
    `rows` of the exported embeddings cannot be generated. Raises ModelError if an answer does not end where it must."""
    with library_errors(f"{folder}: transformers cannot generate with its {FILE}"):
        config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        # the ways to search for an answer and the kinds of cache have no effect on where an answer ends
        config.update(num_beams=1, num_return_sequences=1, do_sample=False, cache_implementation=None)
        sizes: dict[str, Any] = {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
        }
        model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=rows, **sizes)).eval()
        model.generation_config = config
        pad = config.pad_token_id
        ends_nothing = next(number for number in range(rows) if number not in (*ends, pad))
        named = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        if {*named} - {None} != {*ends}:
            raise ModelError(f"{folder / FILE} names {named} as the ends of an answer, which are {sorted(ends)}")
        possible = [number for number in sorted(ends) if number < rows]
        for begin in range(0, len(possible) + 1, GROUP):
            group = possible[begin : begin + GROUP]
            answers = torch.full((len(group) + 1, LONGEST), ends_nothing)  # no token ends the last answer
            for row, end in enumerate(group):
                answers[row, row % (LONGEST - 1)] = end
            expected = answers.clone()
            for row in range(len(group)):
                expected[row, row % (LONGEST - 1) + 1 :] = pad
            start = torch.full((len(group) + 1, 1), ends_nothing)
            forced = LogitsProcessorList([Prescribed(answers)])
            # without a mask, transformers warns if a model pads with the token that ends an answer
            mask = torch.ones_like(start)
            written = model.generate(start, attention_mask=mask, logits_processor=forced, max_new_tokens=LONGEST)
            if not torch.equal(written[:, 1:], expected):
                raise ModelError(
                    f"{folder}: transformers' generate writes {written[:, 1:].tolist()} instead of "
                    f"{expected.tolist()}, so that an answer does not end at one of {group}"
                )


class Prescribed(LogitsProcessor):
    """Logits processor for transformers' `generate` that lets it write prescribed answers."""

    def __init__(self, answers: torch.Tensor):
        """Prescribe the tokens of answers to prompts of one token: int64 [answers, length]."""
        self.answers = answers

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = input_ids.shape[1] - 1
        return torch.full_like(scores, -torch.inf).scatter(1, self.answers[:, step : step + 1], 0.0)
