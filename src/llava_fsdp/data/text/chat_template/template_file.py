"""Read the chat template (Jinja) and the special tokens from the files of a model's folder."""

from pathlib import Path
from typing import Any

from llava_fsdp.data.text.tokens.tokenizer import read_optional
from llava_fsdp.runtime.files.safe_load import read_text

FILE = "chat_template.jinja"
BEGIN = "{# the model's own chat template begins #}\n"
END = "{{ '' }}{% endset %}{# the model's own chat template ends #}"
"""Texts before and after the model's template in an exported file. The code outside of them converts messages to the
turns that training saw. Without the empty text, Jinja would remove white space at the end of the model's template."""
OLDER_END = "{%+ endset %}{# the model's own chat template ends #}"
"""The text after the model's template in files that earlier versions exported. llama.cpp does not know its `+`."""
BEGIN_PARTS = "{# the model's own chat template, which gets images as parts of messages, begins #}\n"
"""Text that stands instead of BEGIN if training gave images to the template as parts of messages."""
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Variables of a template for which transformers gives it special tokens."""
DATE = (
    "{%- macro strftime_now(format) -%}{{- format | replace('%d', '26') | replace('%-d', '26') | replace('%m', '07')"
    " | replace('%b', 'Jul') | replace('%B', 'July') | replace('%A', 'Friday') | replace('%y', '24')"
    " | replace('%Y', '2024') -}}{%- endmacro %}\n"
)
"""Jinja code that is put before a template which writes today's date: it is always 26 July 2024, which Llama 3 writes
if it knows none. Otherwise the tokens of a record would change from day to day."""
BOS = "{%- if true %}{{- bos_token }}{%- endif %}\n"
"""Jinja code that is put before the template of a LLaVA-NeXT model: it writes the BOS token, which the processor adds
and the template lacks."""


def find_code(folder: Path) -> tuple[Path, str] | None:
    """Return the file of a model's template and the Jinja code, completed by `complete`; None without one."""
    found = find_file(folder)
    return None if found is None else (found[0], complete(found[1], folder))


def find_file(folder: Path) -> tuple[Path, str] | None:
    """Return the file of a model's template and its Jinja code; None without one.

    The files are those of transformers: `chat_template.jinja`, `chat_template.json`, `tokenizer_config.json`.
    """
    for path in (folder / FILE, folder / "chat_template.json", folder / "tokenizer_config.json"):
        code: Any = None
        if path.is_file():
            code = read_text(path) if path.suffix == ".jinja" else read_optional(path).get("chat_template")
        if isinstance(code, list):
            code = next((entry["template"] for entry in code if entry.get("name") == "default"), None)
        if isinstance(code, str) and code:
            return path, code
    return None


def complete(code: str, folder: Path) -> str:
    """Return the code of a template, preceded by code that adds what it lacks: the BOS token for a LLaVA-NeXT model,
    and a fixed date for a template that writes the current one. A file that this program exported has more code around
    the model's own template: then only the latter is returned."""
    for begin in (BEGIN, BEGIN_PARTS):
        if begin in code:
            end = END if END in code else OLDER_END
            return code.partition(begin)[2].rpartition(end)[0]
    bos = special_tokens(folder).get("bos_token")
    is_processor = read_optional(folder / "config.json").get("model_type") == "llava_next"
    add = BOS if is_processor and bos and bos not in code and "bos_token" not in code else ""
    return add + (DATE if "strftime_now" in code else "") + code.removesuffix("\n")


def special_tokens(folder: Path) -> dict[str, str]:
    """Return {variable of templates, such as `bos_token`: special token} from the tokenizer's files."""
    found = read_optional(folder / "special_tokens_map.json") | read_optional(folder / "tokenizer_config.json")
    if (folder / "tokenizer.model").is_file():
        # a tokenizer.model is that of a Llama tokenizer, which has these tokens unless one of the files names others
        found = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **found}
    values = {name: found.get(name) for name in NAMED}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
