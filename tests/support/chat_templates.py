"""The published chat templates that TRL ships, and small tokenizers with the special tokens that occur in them."""

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path

from small import write_json
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

NO_LAYOUT = {
    "deepseek_r1_distill", "deepseekv3", "glm4moe", "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super",
    "nemotron_3_ultra",
}  # fmt: skip
"""Templates that TRL ships and whose plain conversations have no layout by default: the prompt of an answer is not what
is written before it, or nothing ends the last answer. Their answers are taught one by one."""
ONLY_THOUGHTS = {"deepseek_r1_distill", "deepseekv3"}
"""Templates whose prompts always open a thought, so that only answers with one can be taught."""
SEVERAL = {"gptoss", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"}
"""Templates with which conversations of several exchanges have no layout: once others follow, an answer is written in
another way than a model writes it. Their answers are taught one by one, too."""
CORPUS = "the circle is red, how many? user assistant system größe 中文 12 34\n\n  a b\n"
SPECIAL = re.compile(
    r"<\|[\w/]+\|?>|<\uff5c[^\uff5c]+\uff5c>|<\w+\|>|</?s>|<(?:start|end)_of_(?:turn|utterance|image)>|\[gMASK\]|<sop>"
)
WORDS = r"(?i:'[sdmt])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Llama 3 and Qwen divide text: line breaks are one word, whatever follows them."""


def folder_of_templates() -> Path:
    """TRL's folder; TRL itself is not imported, because it needs packages that nothing else here needs."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "chat_templates"


def published() -> dict[str, str]:
    """The templates by name, without those that TRL changed for training."""
    files = sorted(folder_of_templates().glob("*.jinja"))
    return {path.stem: path.read_text() for path in files if not path.stem.endswith("_training")}


def changed() -> dict[str, str]:
    """TRL's templates for training by the name of the published one, with marks around what is supervised."""
    files = sorted(folder_of_templates().glob("*_training.jinja"))
    return {path.stem.removesuffix("_training"): path.read_text() for path in files}


def specials(code: str) -> list[str]:
    return sorted({"<bos>", "<eos>", *SPECIAL.findall(code)})


def write_tokenizer(code: str, folder: Path, pieces: bool = False, special: Sequence[str] = ()) -> Path:
    """A model's folder with a tokenizer and the chat template `code`.

    Args:
        pieces: words that begin with a space (as Gemma's) instead of bytes (as Qwen's).
        special: special tokens beside those in the template.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = FastTokenizer(models.BPE(byte_fallback=pieces, unk_token="<unk>" if pieces else None))
    special = sorted({*specials(code), *special})
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if pieces:
        made.normalizer = normalizers.Replace(" ", "▁")
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
        )
        alphabet = sorted({*CORPUS.replace(" ", "▁")})
        special = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256))]
    else:
        words = pre_tokenizers.Split(Regex(WORDS), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
        made.decoder = decoders.ByteLevel()
    size = len(special) + len(alphabet) + 60
    made.train_from_iterator(
        [CORPUS] * 3, trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    )
    frozen = json.loads(made.to_str())
    frozen["added_tokens"] = [t for t in frozen["added_tokens"] if not t["content"].startswith("<0x")]
    write_json(folder / "tokenizer.json", frozen)
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    (folder / "chat_template.jinja").write_text(code)
    return folder
