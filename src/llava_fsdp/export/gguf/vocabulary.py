"""Write a tokenizer and a chat template into the keys of a GGUF file, and build a tokenizer from these keys again.

llama.cpp has two algorithms for the tokenizers of the language models that are written here. `gpt2` splits a text by a
named rule and joins bytes in the order of a list of merges. `llama` joins characters in the order of the tokens'
scores.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from llava_fsdp.data.text.chat_template.template_file import find_file
from llava_fsdp.data.text.tokens.detokenize import eos_ids
from llava_fsdp.export.gguf.gguf_writer import import_gguf
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.safe_load import LARGE, read_json

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES_AFTER_SPLIT = ("ByteLevel", False)
RULES: dict[tuple[tuple[str, object], ...], str] = {
    (("ByteLevel", True),): "gpt-2",
    (("Digits", True), ("ByteLevel", True)): "smollm",
    (("Split", CONTRACTIONS + r"\p{N}" + REST), BYTES_AFTER_SPLIT): "qwen2",
    (("Split", CONTRACTIONS + r"\p{N}{1,3}" + REST), BYTES_AFTER_SPLIT): "llama-bpe",
}
"""llama.cpp's name of each rule by which a text is split before its bytes are joined (llama-vocab.cpp), by the steps of
`tokenizer.json` that do the same: kind, and its regular expression or flag."""
WHOLE_WORDS = ("llama-bpe",)
"""Rules with which llama.cpp takes a word that is a token as it is, without the merges (`ignore_merges`)."""
ENDS = ("eos", "eot", "eom")
"""Keys of the tokens that end an answer in llama.cpp."""
SPACE = "▁"


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a tokenizer as a GGUF file has them.

    Attributes:
        tokens, types: text and `gguf.TokenType` of each token, in the order of their ids.
        merges: pairs of tokens, joined by a space, in the order in which they are joined; for the algorithm `gpt2`.
        scores: the higher, the earlier a token is joined; for the algorithm `llama`.
        splitting_rule: llama.cpp's name of it; empty for the algorithm `llama`.
        adds_space: whether a space is put before each text that follows a special token, or begins a prompt.
    """

    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    splitting_rule: str
    adds_space: bool


def add_vocabulary(writer: Any, folder: Path, rows: int) -> None:
    """Add the tokenizer, the special tokens and the chat template of a model folder to the keys of a GGUF file. `rows`:
    number of rows of the embeddings. The chat template writes the BOS token, so llama.cpp is told to add none.

    Raises:
        ModelError: llama.cpp would tokenize a text otherwise.
    """
    vocabulary = read_vocabulary(folder, rows)
    if vocabulary.splitting_rule:  # byte-level BPE: llama.cpp's name of the rule that splits a text before merging
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(vocabulary.splitting_rule)
        writer.add_token_merges(vocabulary.merges)
    else:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(vocabulary.scores)
    writer.add_add_space_prefix(vocabulary.adds_space)
    writer.add_add_bos_token(False)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    for name, token in special_ids(folder, vocabulary.tokens).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    code = find_file(folder)  # (file, Jinja code) of the chat template
    if code is not None:
        writer.add_chat_template(code[1])


def read_vocabulary(folder: Path, rows: int) -> Vocabulary:
    """Read the tokens of the `tokenizer.json` of a model folder. Embeddings beyond them get tokens of their own that no
    text has. Raise ModelError if llama.cpp has no algorithm that does the same."""
    kinds = import_gguf().TokenType
    path = folder / "tokenizer.json"
    content = read_json(path, largest=LARGE)
    model, added = content["model"], {token["id"]: token for token in content["added_tokens"]}
    if model["type"] != "BPE":
        raise ModelError(f"{path} has a {model['type']} tokenizer; format=gguf writes BPE ones")
    flagged = [t["content"] for t in added.values() if t.get("lstrip") or t.get("rstrip") or t.get("single_word")]
    if flagged:
        raise ModelError(
            f"{path}: the special token {flagged[0]!r} has lstrip, rstrip or single_word, which llama.cpp does not know"
        )
    names = {token: text for text, token in model["vocab"].items()} | {n: t["content"] for n, t in added.items()}
    rule = splitting_rule(content, path)  # empty: a tokenizer like Llama's, whose words begin with `▁`
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    tokens, types = [], []
    for number in range(rows):
        text = names.get(number, f"[PAD{number}]")
        tokens.append(text)
        if number not in names:
            types.append(kinds.UNUSED)
        elif number in added:
            types.append(kinds.CONTROL if added[number]["special"] else kinds.USER_DEFINED)
        elif not rule and len(text) == 6 and text.startswith("<0x"):
            types.append(kinds.BYTE)
        else:
            types.append(kinds.NORMAL)
    scores = [-float(ranks.get(text, len(merges))) for text in tokens]
    adds_space = not rule and any(
        step["type"] == "Prepend" or step.get("prepend_scheme") == "always"
        for section in ("normalizer", "pre_tokenizer")
        for step in steps_of(content.get(section))
    )
    return Vocabulary(tokens, [int(kind) for kind in types], merges, scores, splitting_rule=rule, adds_space=adds_space)


def normalizes(folder: Path) -> bool:
    """Return whether the tokenizer of a model folder brings text into another Unicode form, unlike llama.cpp."""
    content = read_json(folder / "tokenizer.json", largest=LARGE)
    return any(step["type"] == "NFC" for step in steps_of(content.get("normalizer")))


def splitting_rule(content: Mapping[str, Any], path: Path) -> str:
    """Return llama.cpp's name of the rule by which a tokenizer (`content` of its `tokenizer.json`, `path`) splits a
    text; empty for one whose words begin with `▁`. Raise ModelError if llama.cpp has no such rule."""
    steps, normal = steps_of(content.get("pre_tokenizer")), steps_of(content.get("normalizer"))
    kinds, changes = {step["type"] for step in steps}, {step["type"] for step in normal}
    replaces = any(step.get("content") == SPACE for step in normal) or "Metaspace" in kinds
    if replaces and kinds <= {"Metaspace", "Digits"} and changes <= {"Prepend", "Replace"}:
        if content["model"].get("byte_fallback"):
            return ""
        raise ModelError(f"{path} has no tokens for bytes (byte_fallback), which llama.cpp needs")
    rule = RULES.get(tuple(rule_key_of_step(step) for step in steps))
    reason = ""
    if rule is None:
        reason = f"its pre_tokenizer is not one of {', '.join(RULES.values())}, and its words do not begin with {SPACE}"
    elif changes - {"NFC"}:
        reason = f"its normalizer has {', '.join(sorted(changes))}"
    elif bool(content["model"].get("ignore_merges")) != (rule in WHOLE_WORDS):
        reason = f"its ignore_merges is {content['model'].get('ignore_merges')}, unlike that of llama.cpp's {rule}"
    if rule is None or reason:
        raise ModelError(f"{path}: llama.cpp could tokenize texts otherwise: {reason}")
    return rule


def steps_of(section: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the steps of a section of a `tokenizer.json`, which has one, several or none."""
    if section is None:
        return []
    return (
        [*section.get("pretokenizers", section.get("normalizers", []))] if section["type"] == "Sequence" else [section]
    )


def rule_key_of_step(step: Mapping[str, Any]) -> tuple[str, object]:
    """Return a step of a `tokenizer.json` as RULES has it: (kind, its regular expression or flag; None if unknown)."""
    kind = step["type"]
    if kind == "Split":
        is_plain = step["behavior"] == "Isolated" and not step["invert"]
        return kind, step["pattern"].get("Regex") if is_plain else None
    if kind == "ByteLevel":
        return kind, None if step["add_prefix_space"] else step.get("use_regex", True)
    return kind, step.get("individual_digits")


def special_ids(folder: Path, tokens: list[str]) -> dict[str, int]:
    """Return the special tokens of a model folder by the names that GGUF gives them: those of the tokenizer's
    configuration, and those that end an answer by `generation_config.json`. Raise ModelError if more tokens end an
    answer than llama.cpp has keys for."""
    config, generation = (read_json(folder / name) for name in ("tokenizer_config.json", "generation_config.json"))
    found: dict[str, int] = {}
    for name, ours in (("bos", "bos"), ("unknown", "unk"), ("padding", "pad"), ("eos", "eos")):
        value = config.get(f"{ours}_token")
        text = value["content"] if isinstance(value, dict) else value
        if text in tokens:
            found[name] = tokens.index(text)
    # `eos_token` has the key eos only if it ends an answer, and then comes first: a chat template may use it otherwise
    eos = found.pop("eos", None)
    ends = sorted(eos_ids(generation, folder / "generation_config.json"), key=lambda token: (token != eos, token))
    if len(ends) > len(ENDS):
        raise ModelError(
            f"{len(ends)} tokens end an answer, and a GGUF file has places for {len(ENDS)}; train with a template "
            "whose answers end with a special token"
        )
    return found | dict(zip(ENDS, ends, strict=False))


def open_vocabulary(keys: Mapping[str, Any]) -> FastTokenizer:
    """Build a tokenizer from the keys of a GGUF file alone, with the package tokenizers, by llama.cpp's rules.

    Raises:
        ModelError: the splitting rule is not in RULES.
    """
    kinds = import_gguf().TokenType
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    vocab = {text: number for number, text in enumerate(tokens) if types[number] != kinds.UNUSED}
    if keys["tokenizer.ggml.model"] == "gpt2":
        rule = keys["tokenizer.ggml.pre"]
        steps = next((steps for steps, name in RULES.items() if name == rule), None)
        if steps is None:
            raise ModelError(f"the file names the splitting rule {rule}, which is not known")
        merges = [tuple(merge.split(" ")) for merge in keys["tokenizer.ggml.merges"]]
        made = FastTokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule in WHOLE_WORDS))
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer_of_rule_step(kind, value) for kind, value in steps])
        made.decoder = decoders.ByteLevel()
    else:
        scores = keys["tokenizer.ggml.scores"]
        pairs = [
            (-scores[number], text[:cut], text[cut:])
            for text, number in vocab.items()
            if types[number] == kinds.NORMAL
            for cut in range(1, len(text))
            if text[:cut] in vocab and text[cut:] in vocab
        ]
        merges = [(left, right) for _, left, right in sorted(pairs)]
        unknown = tokens[keys["tokenizer.ggml.unknown_token_id"]] if "tokenizer.ggml.unknown_token_id" in keys else None
        made = FastTokenizer(
            models.BPE(vocab=vocab, merges=merges, unk_token=unknown, byte_fallback=True, fuse_unk=True)
        )
        spaces = [normalizers.Prepend(SPACE)] if keys["tokenizer.ggml.add_space_prefix"] else []
        made.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
    added = [
        AddedToken(tokens[number], special=kind == kinds.CONTROL, normalized=False)
        for number, kind in enumerate(types)
        if kind in (kinds.CONTROL, kinds.USER_DEFINED)
    ]
    made.add_special_tokens(added)
    return made


def pre_tokenizer_of_rule_step(kind: str, value: object) -> pre_tokenizers.PreTokenizer:
    """Build a step of RULES from its kind, and its regular expression or flag (`value`)."""
    if kind == "Split":
        return pre_tokenizers.Split(Regex(str(value)), "isolated")
    if kind == "Digits":
        return pre_tokenizers.Digits(individual_digits=bool(value))
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(value))
