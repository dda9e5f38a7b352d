"""Ids, labels and the places of pictures."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import sentencepiece.sentencepiece_model_pb2
from small import ASSETS

from llava_fsdp.config import SpecialTokens, TooLong
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.forms.parse_record import parse_record
from llava_fsdp.data.records.record import Record, Turn
from llava_fsdp.data.text.conversation import IM_END, IM_START, opening_question, prompt
from llava_fsdp.data.text.encode import ExactEncoder, OriginalEncoder, are_supervised, encode_prompt
from llava_fsdp.data.text.llava_v1_5 import Original, check_like_original
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.text.templates import CURIOUS_USER, TEMPLATES, template
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID
from llava_fsdp.data.text.tokens.tokenizer import Token, Tokenizer, open_tokenizer
from llava_fsdp.runtime.errors import ConfigError, DataError, ModelError

SYSTEM = CURIOUS_USER + " "


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece BPE model with Llama's settings."""
    folder = tmp_path_factory.mktemp("llama")
    text = folder / "text.txt"
    words = "the a red circle USER ASSISTANT: what colour is it? 1234567890 blue square chat between curious".split()
    text.write_text("\n".join(" ".join(words[i:] + words[:i]) for i in range(len(words))) * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=340, model_type="bpe", byte_fallback=True,
        split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text('{"legacy": false}')
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_tokenizer(ASSETS / "tiny-llama")


def record(*texts: str, images: tuple[str, ...] = ()) -> Record:
    turns = tuple(Turn("human" if n % 2 == 0 else "gpt", text) for n, text in enumerate(texts))
    return Record("data.json", 3, "abc", images, turns, bool(images))


def encoder(
    tokenizer: Tokenizer, form: str = "v1", max_length: int = 999, too_long: TooLong = TooLong.truncate
) -> ExactEncoder:
    return ExactEncoder(tokenizer, template(form), lambda *_: np.arange(4), max_length, too_long)


def supervised(sample, tokenizer: Tokenizer) -> list[str]:
    """The stretches of text that are supervised."""
    stretches, current = [], []
    for token, label in zip(sample.input_ids.tolist(), [*sample.labels.tolist()], strict=True):
        assert label in (IGNORE, token)
        if label == IGNORE and current:
            stretches.append(current)
            current = []
        elif label != IGNORE:
            current.append(token)
    return [tokenizer.decode(s).strip() for s in [*stretches, current] if s]


def both_tokenizers(tokenizer: Tokenizer, llama_folder: Path) -> list[Tokenizer]:
    return [tokenizer, open_tokenizer(llama_folder)]


def test_every_answer_and_nothing_else_is_supervised(tokenizer: Tokenizer, llama_folder: Path) -> None:
    texts = ("what colour is it?", "red", "and  the\nsize 12?", "a 7 blue — größe 中", "x", "y")
    for each in both_tokenizers(tokenizer, llama_folder):
        sample = encoder(each)(record(*texts))
        assert sample is not None
        assert supervised(sample, each) == ["red", "a 7 blue — größe 中", "y"]
        ends = sample.labels[np.flatnonzero(sample.labels == 2)]
        assert len(ends) == 3, "the end of every answer is supervised too"
        text = f"{SYSTEM}USER: {texts[0]} ASSISTANT: {texts[1]}</s>"
        text += f"USER: {texts[2]} ASSISTANT: {texts[3]}</s>USER: x ASSISTANT: y</s>"
        assert sample.input_ids.tolist() == [1, *(t.id for t in each.encode(text))]


def test_a_token_is_supervised_by_any_of_its_characters() -> None:
    """Characters 2 to 4 are; a token that has no character counts as the one at its place."""
    before = np.array([0, 0, 0, 1, 2, 3, 3])
    spans = [(0, 2), (1, 3), (2, 5), (4, 6), (5, 6), (3, 3), (1, 1)]
    found = are_supervised([Token(7, begin, end) for begin, end in spans], before)
    assert found == [False, True, True, True, False, True, False]


def test_digit_after_the_space_of_an_answer(llama_folder: Path) -> None:
    """Digits are split from the space before them; the original supervises that space as well."""
    each = open_tokenizer(llama_folder)
    sample = encoder(each)(record("what", "7"))
    assert sample is not None
    space = each.encode("7")[0].id
    assert [t for t in sample.labels.tolist() if t != IGNORE] == [space, each.encode("a7")[-1].id, 2]


def test_picture_takes_its_positions_and_chunks_are_tokenized_alone(tokenizer: Tokenizer, llama_folder: Path) -> None:
    for each in both_tokenizers(tokenizer, llama_folder):
        sample = encoder(each)(record("what is it? <image>", "red", images=("a.png",)))
        assert sample is not None and sample.images == ("a.png",)
        before = [t.id for t in each.encode(f"{SYSTEM}USER: ")]
        after = [t.id for t in each.encode("\nwhat is it? ASSISTANT: red</s>")]
        assert sample.input_ids.tolist() == [1, *before, *[IMAGE_ID] * 4, *after], "a single tag moves to the front"


def test_plain_supervises_the_caption_and_its_newline(tokenizer: Tokenizer) -> None:
    sample = encoder(tokenizer, "plain")(record("Describe it <image>.", "a red circle", images=("a.png",)))
    assert sample is not None
    caption = [t.id for t in tokenizer.encode("a red circle\n")]
    assert sample.input_ids.tolist() == [1, *[IMAGE_ID] * 4, *caption]
    assert sample.labels.tolist() == [*[IGNORE] * 5, *caption]


def test_several_pictures_stay_where_they_are(tokenizer: Tokenizer) -> None:
    sample = encoder(tokenizer)(record("is <image> or <image> red", "a", "and <image>", "b", images=("1", "2", "3")))
    assert sample is not None
    starts = np.flatnonzero(np.diff((sample.input_ids == IMAGE_ID).astype(int), prepend=0) == 1)
    assert len(starts) == 3 and (sample.input_ids == IMAGE_ID).sum() == 12
    assert supervised(sample, tokenizer) == ["a", "b"]


def test_every_image_takes_as_many_positions_as_it_has(tokenizer: Tokenizer) -> None:
    lengths = (2, 5, 3)
    each = ExactEncoder(tokenizer, template("v1"), lambda _, n: np.arange(lengths[n]), 999, TooLong.fail)
    sample = each(record("<image> a <image> b <image>", "red", images=("1", "2", "3")))
    assert sample is not None
    places = np.flatnonzero(sample.input_ids == IMAGE_ID)
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    assert [len(run) for run in runs] == [len(rows) for rows in sample.image_rows] == list(lengths)


def test_tag_without_a_picture_is_text(tokenizer: Tokenizer) -> None:
    sample = encoder(tokenizer)(record("what is <image> for", "red"))
    assert sample is not None and IMAGE_ID not in sample.input_ids


def test_a_tag_is_only_wrong_where_the_record_has_images(tokenizer: Tokenizer) -> None:
    """Else it is text, in an answer and in a system turn too."""
    plain = record("what", "a <image> tag")
    for made in (plain, with_system("of <image>", plain)):
        sample = encoder(tokenizer)(made)
        assert sample is not None and IMAGE_ID not in sample.input_ids
        with pytest.raises(DataError) as caught:
            encoder(tokenizer)(replace(made, images=("1.png",)))
        assert caught.value.kind == Kind.image_count


def test_the_first_question_has_the_images_of_its_tags(tokenizer: Tokenizer) -> None:
    texts = "see <image>, <image>", "red", "<image>?", "blue"
    for made in (
        record(*texts, images=("1", "2", "3")),
        record(*texts, images=("1", "2")),
        record(*texts, images=("1",)),
    ):
        assert opening_question(made) == (None, texts[0], min(2, len(made.images)), "red")
    assert opening_question(record(*texts)) == (None, texts[0], 0, "red"), "tags are text"
    three = record(*texts, images=("1", "2", "3"))
    assert opening_question(with_system("be brief", three)) == ("be brief", texts[0], 2, "red")


@pytest.mark.parametrize("cut", [-1, -3])
def test_truncation_is_counted(tokenizer: Tokenizer, cut: int) -> None:
    whole = encoder(tokenizer)(record("what", "red blue green circle"))
    assert whole is not None
    short = encoder(tokenizer, max_length=len(whole.input_ids) + cut)(record("what", "red blue green circle"))
    assert short is not None
    assert short.input_ids.tolist() == whole.input_ids.tolist()[:cut]
    assert (short.positions_cut, short.labels_cut) == (-cut, -cut)


def test_no_picture_is_partly_cut(tokenizer: Tokenizer) -> None:
    """A sample that would end within a picture ends before it."""
    texts = ("see <image> and then <image>", "red")
    whole = encoder(tokenizer)(record(*texts, images=("1", "2")))
    assert whole is not None
    second = np.flatnonzero(whole.input_ids == IMAGE_ID)[4]
    for length in range(second, second + 4):
        sample = encoder(tokenizer, max_length=int(length))(record(*texts, images=("1", "2")))
        assert sample is not None
        assert len(sample.input_ids) == second and sample.images == ("1",)
    sample = encoder(tokenizer, max_length=int(second) + 4)(record(*texts, images=("1", "2")))
    assert sample is not None and sample.images == ("1", "2")


def test_too_long_can_fail_or_be_left_out(tokenizer: Tokenizer) -> None:
    assert encoder(tokenizer, max_length=5, too_long=TooLong.skip)(record("what", "red")) is None
    with pytest.raises(
        DataError, match=r"data\.json, record 3 \(id abc\) is \d+ positions long, over data\.max_length=5"
    ):
        encoder(tokenizer, max_length=5, too_long=TooLong.fail)(record("what", "red"))


BAD = {
    "two questions": (("a", "b", "c"), (), "3 turns; it must end with an answer"),
    "no turns": ((), (), "no turns"),
    "missing tag": (("a", "b"), ("1.png",), "0 <image> tags for 1 images"),
    "missing picture": (("<image><image>", "b"), ("1.png",), "2 <image> tags for 1 images"),
    "tag in answer": (("<image>", "<image>"), ("1.png",), "turn 1 is an answer with <image>"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_records_are_named(tokenizer: Tokenizer, case: str) -> None:
    texts, images, message = BAD[case]
    with pytest.raises(DataError, match=rf"data\.json, record 3 \(id abc\).*{message}"):
        encoder(tokenizer)(record(*texts, images=images))


def test_two_turns_of_one_role_are_named(tokenizer: Tokenizer) -> None:
    wrong = Record("data.json", 3, "abc", (), (Turn("human", "a"), Turn("human", "b")), False)
    with pytest.raises(DataError, match="turn 1 is from 'human', not from 'gpt'"):
        encoder(tokenizer)(wrong)


def with_system(text: str, made: Record) -> Record:
    return replace(made, turns=(Turn("system", text), *made.turns))


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_system_turn_replaces_the_template_s_system_text(tokenizer: Tokenizer, form: str) -> None:
    """With the template's own text as its text, the ids and labels are those without it."""
    shape = TEMPLATES[form]
    before, after = shape.around_system
    made = record("<image>\nwhat colour?", "red", images=("1.png",))
    same = with_system(shape.system.removeprefix(before).removesuffix(after), made)
    other = with_system("be  kind </s>", made)
    plain, again, changed = (encoder(tokenizer, form)(each) for each in (made, same, other))
    assert plain is not None and again is not None and changed is not None
    if shape.system or shape.image_only:
        assert again.input_ids.tolist() == plain.input_ids.tolist()
        assert again.labels.tolist() == plain.labels.tolist()
    else:
        assert tokenizer.decode(again.input_ids[again.input_ids >= 0].tolist()).startswith("[INST] <<SYS>>")
    assert supervised(changed, tokenizer) == supervised(plain, tokenizer)
    text = tokenizer.decode([i for i in changed.input_ids.tolist() if i != IMAGE_ID])
    assert text.count("be  kind </s>") == (not shape.image_only), "special tokens of its text stay text"
    assert shape.system not in text or not shape.system


def test_an_answer_after_the_system_turn_is_left_out(tokenizer: Tokenizer) -> None:
    made = record("what", "red")
    begun = replace(made, turns=(Turn("gpt", "hello"), *made.turns))
    found, expected = (encoder(tokenizer)(with_system("be kind", each)) for each in (begun, made))
    assert found is not None and expected is not None and found.input_ids.tolist() == expected.input_ids.tolist()


WRONG_SYSTEM = {
    "later": ((Turn("human", "a"), Turn("gpt", "b"), Turn("system", "c")), (), Kind.wrong_roles),
    "twice": ((Turn("system", "a"), Turn("system", "b"), Turn("human", "c"), Turn("gpt", "d")), (), Kind.wrong_roles),
    "alone": ((Turn("system", "a"),), (), Kind.odd_turns),
    "with an image": (
        (Turn("system", "a <image>"), Turn("human", "<image>"), Turn("gpt", "d")), ("1.png",), Kind.image_count,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_SYSTEM)
def test_wrong_system_turns_are_refused(tokenizer: Tokenizer, case: str) -> None:
    turns, images, kind = WRONG_SYSTEM[case]
    with pytest.raises(DataError) as caught:
        encoder(tokenizer)(Record("data.json", 3, "abc", images, turns, bool(images)))
    assert caught.value.kind is kind


@pytest.mark.parametrize("form", ["v1", "llama_2", "mpt"])
def test_the_original_stops_at_a_system_turn(tokenizer: Tokenizer, form: str) -> None:
    with pytest.raises(DataError) as caught:
        check_like_original(with_system("a", record("b", "c")), Original(tokenizer, template(form), 99))
    assert caught.value.kind is Kind.wrong_roles


def test_unknown_template_lists_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"data\.template=v9 does not exist; choose one of chatml, .*alias: chatml_d"):
        template("v9")


@pytest.mark.parametrize("form", TEMPLATES)
def test_every_template_supervises_answers_and_their_ends(tokenizer: Tokenizer, form: str) -> None:
    texts = ("<image>\nwhat colour?", "red  one", "and", "USER: blue\n")
    texts = texts[:2] if TEMPLATES[form].image_only else texts
    sample = encoder(tokenizer, form)(record(*texts, images=("1.png",)))
    assert sample is not None
    pattern = TEMPLATES[form].pattern
    taught = [pattern.before_answer + answer + pattern.after_answer for answer in texts[1::2]]
    assert supervised(sample, tokenizer) == [t.replace("</s>", "").strip() for t in taught]
    assert (sample.labels == IGNORE).sum() > 4


@pytest.mark.parametrize("start_end", [False, True])
@pytest.mark.parametrize("form", TEMPLATES)
def test_generation_continues_where_training_supervises(form: str, start_end: bool) -> None:
    """The prompt of a question is the training text up to its answer, whatever stands around a picture."""
    shape = template(form)
    each = open_tokenizer(ASSETS / "tiny-llama", extra=(IM_START, IM_END))
    sample = ExactEncoder(each, shape, lambda *_: np.arange(4), 999, TooLong.fail, start_end)(
        record("<image>\nwhat", "red", images=("1",))
    )
    assert sample is not None
    asked = encode_prompt(prompt([Turn("human", "<image>\nwhat")], shape, start_end, True), each, [4])
    first = int(np.flatnonzero(sample.labels != IGNORE)[0])
    assert sample.input_ids[:first].tolist() == asked.tolist()
    assert (each.special(IM_START) in sample.input_ids) == (start_end and not shape.image_only)


def test_llama_tokenizer_matches_sentencepiece(llama_folder: Path) -> None:
    """On text without special tokens the ids are SentencePiece's own, with its one leading space."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(llama_folder / "tokenizer.model"))
    each = open_tokenizer(llama_folder)
    for text in ("the red circle", " a  b   c", "größe 中文 🙂", "1234 56", "\n\tx", "a"):
        tokens = each.encode(text)
        assert [t.id for t in tokens] == pieces.encode(text)
        assert tokens[-1].end == len(text)
        assert [t.begin for t in tokens] == sorted(t.begin for t in tokens)


def test_no_space_is_added_after_a_special_token(llama_folder: Path) -> None:
    each = open_tokenizer(llama_folder)
    after = [t.id for t in each.encode("a</s>red")][len(each.encode("a")) :]
    assert after[0] == 2
    assert after[1:] != [t.id for t in each.encode("red")]
    assert each.decode(after) == "red"


@pytest.fixture(params=["sentencepiece", "tokenizer.json", "with spaces taken along"])
def either(request: pytest.FixtureRequest, llama_folder: Path, tmp_path: Path) -> Tokenizer:
    """Tokenizers of both kinds, and one whose special tokens take the spaces beside them along, as Phi-3's do."""
    if request.param == "sentencepiece":
        return open_tokenizer(llama_folder)
    frozen = json.loads((ASSETS / "tiny-llama" / "tokenizer.json").read_text())
    if request.param != "tokenizer.json":
        for token in frozen["added_tokens"]:
            token |= {"rstrip": token["content"] == "</s>", "lstrip": token["content"] == "<s>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(frozen))
    (tmp_path / "tokenizer_config.json").write_bytes((ASSETS / "tiny-llama" / "tokenizer_config.json").read_bytes())
    return open_tokenizer(tmp_path)


@pytest.mark.parametrize("form", ["v1", "llama_2", "plain"])
@pytest.mark.parametrize("text", ["a </s> b", "</s>", "<s>a</s>", "a <unk><unk>b", "x</s></s> ", "</s>a <s> b </s> c"])
def test_special_tokens_of_a_text_are_text(text: str, form: str, either: Tokenizer) -> None:
    """Those of the template stay what they are, and every character is a token's; parsed, they are all tokens."""
    own = record(f"<image>\n{text}", text, images=("1",))
    made = {how: encoded(own, either, form, how) for how in SpecialTokens}
    special = {either.special(token) for token in ("<s>", "</s>", "<unk>")} - {None}
    counts = {how: sum(int(i) in special for i in sample.input_ids) for how, sample in made.items()}
    without = encoded(record("<image>\nwhat", "red", images=("1",)), either, form, SpecialTokens.text)
    assert counts[SpecialTokens.text] == sum(int(i) in special for i in without.input_ids)
    occurrences = len(either.find_special(text)) * (1 if form == "plain" else 2)
    assert counts[SpecialTokens.parse] == counts[SpecialTokens.text] + occurrences > 0
    sample = made[SpecialTokens.text]
    answer = either.decode(sample.labels[sample.labels != IGNORE].tolist())
    assert answer.replace(" ", "").strip() == text.replace(" ", "").strip()
    ends = sample.labels[-1] == either.special("</s>") if form == "v1" else True
    assert ends, "the end of the answer is taught"


def encoded(own: Record, tokenizer: Tokenizer, form: str, how: SpecialTokens) -> Sample:
    encode = replace(encoder(tokenizer, form), special_tokens=how)
    sample = encode(own)
    assert sample is not None
    return sample


def test_texts_without_special_tokens_are_the_same_either_way(either: Tokenizer) -> None:
    own = record("<image>\nwhat is < s > it", "  größe 中 </ s>", "and\n", "red", images=("1",))
    made = [encoded(own, either, "v1", how) for how in SpecialTokens]
    assert made[0].input_ids.tolist() == made[1].input_ids.tolist()
    assert made[0].labels.tolist() == made[1].labels.tolist()


def test_splitting_at_the_template_alone_is_what_the_tokenizer_does(either: Tokenizer) -> None:
    """Where a text's special token is replaced by a word, all before and behind it has the same ids and places."""
    text, begin = "the red </s> circle<s> is blue</s>  the ", 8
    special = [s for s in either.find_special(text) if s[0] != begin]
    found, whole = either.encode(text, special), either.encode(text)
    assert [t for t in found if t.end <= begin - 1] == [t for t in whole if t.end <= begin - 1]
    assert [t for t in found if t.begin >= begin + 14] == [t for t in whole if t.begin >= begin + 14]
    assert either.encode(text, either.find_special(text)) == whole


def original(tokenizer: Tokenizer, max_length: int) -> OriginalEncoder:
    return OriginalEncoder(Original(tokenizer, template("v1"), max_length), lambda *_: np.arange(4))


def test_the_originals_cuts(tokenizer: Tokenizer) -> None:
    """Tags are one token when it cuts first, pictures are spliced in, and it cuts again, within a picture too."""
    asked = record("<image>\nwhat", "red blue green circle", images=("a.png",))
    whole = original(tokenizer, 999)(asked)
    place = int(np.flatnonzero(whole.input_ids == IMAGE_ID)[0])
    assert (whole.input_ids == IMAGE_ID).sum() == 4 and whole.positions_cut == 0 == whole.labels_cut
    unspliced = len(whole.input_ids) - 3
    for length in range(place - 1, len(whole.input_ids) + 1):
        cut = original(tokenizer, length)(asked)
        first_cut = unspliced - min(unspliced, length)  # of the text with its tag; the second takes what is left over
        kept = min(len(whole.input_ids) - first_cut if length > place else length, length)
        assert cut.input_ids.tolist() == whole.input_ids[:kept].tolist(), length
        shown = int((cut.input_ids == IMAGE_ID).sum())
        assert [len(rows) for rows in cut.image_rows] == ([shown] if shown else [])
        assert cut.positions_cut == len(whole.input_ids) - kept - (0 if length > place else 3)
        assert cut.labels_cut == int((whole.labels != IGNORE).sum() - (cut.labels != IGNORE).sum())


def test_the_original_counts_pictures_before_training(tokenizer: Tokenizer) -> None:
    """Two tags in two messages and one picture: the original would take the next record's."""
    wrong = record("<image>\na", "b", "<image>\nc", "d", images=("a.png",))
    with pytest.raises(DataError, match=r"record 3 \(id abc\): 2 images in the text of a record with 1"):
        check_like_original(wrong, original(tokenizer, 999).own)
    check_like_original(record("<image> <image>\na", "b", "c", "d", images=("a.png",)), original(tokenizer, 999).own)
    check_like_original(wrong, original(tokenizer, 20).own)  # the second tag is cut away


def test_the_original_reads_one_picture_a_record(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="has a list of 2 images, at which the original stops"):
        check_like_original(record("<image>\na", "b", images=("a.png", "b.png")), original(tokenizer, 999).own)


def test_half_a_surrogate_pair_is_named() -> None:
    turns = [{"from": "human", "value": "a \ud83d b"}, {"from": "gpt", "value": "c"}]
    with pytest.raises(DataError, match=r"record 4 \(id x\): turn 0 has half of a surrogate pair at character 2"):
        parse_record(Path("a.json"), 4, {"id": "x", "conversations": turns})


def test_other_sentencepiece_models_are_refused(llama_folder: Path, tmp_path: Path) -> None:
    """A model that never puts a space before a text is no Llama's; a file of another kind is none at all."""
    proto = sentencepiece.sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString((llama_folder / "tokenizer.model").read_bytes())
    proto.normalizer_spec.add_dummy_prefix = False
    (tmp_path / "tokenizer.model").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match=r"tokenizer\.model is not a Llama tokenizer; put the model's tokenizer\.json"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(ModelError, match=r"tokenizer\.model is no SentencePiece model"):
        open_tokenizer(tmp_path)


def test_tokens_that_are_put_beside_those_of_a_file(llama_folder: Path) -> None:
    """New ones come last; one that the file has keeps its id."""
    plain = open_tokenizer(llama_folder)
    each = open_tokenizer(llama_folder, extra=("</s>", IM_START, IM_END))
    assert [each.special(token) for token in ("</s>", IM_START, IM_END)] == [2, plain.size, plain.size + 1]
    assert (each.size, plain.size, plain.special(IM_START)) == (342, 340, None)
    assert each.fingerprint != plain.fingerprint
    assert [token.id for token in each.encode(f"a{IM_END}")][-1] == 341
    assert [token.id for token in plain.encode("red a")] == [token.id for token in each.encode("red a")]


def llama_with(folder: Path, target: Path, config: dict, **files: dict) -> Tokenizer:
    target.mkdir(exist_ok=True)
    (target / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (target / f"{name}.json").write_text(json.dumps(content))
    return open_tokenizer(target, 345)


def test_what_the_files_beside_a_sentencepiece_model_say(llama_folder: Path, tmp_path: Path) -> None:
    """Whether it is legacy, begins with BOS, and which tokens were added that the model has rows for."""
    silent = llama_with(llama_folder, tmp_path, {})
    assert silent.legacy and silent.bos == 1 and open_tokenizer(llama_folder).legacy is False
    assert llama_with(llama_folder, tmp_path, {"legacy": True, "add_bos_token": False}).bos is None
    after = [token.id for token in silent.encode("a</s>red")][-1:]
    assert after == [token.id for token in silent.encode("red")], "a space is put before the text again"
    listed = {"341": {"content": "<b>"}}
    each = llama_with(llama_folder, tmp_path, {"added_tokens_decoder": listed}, added_tokens={"<a>": 340, "<c>": 344})
    assert [each.special(token) for token in ("<a>", "<b>", "<c>", "<d>")] == [340, 341, 344, None]
    assert each.size == 345 and len({each.fingerprint, silent.fingerprint}) == 2
    assert [token.id for token in each.encode("<c>")] == [344]


def test_which_file_of_a_tokenizer_is_read(llama_folder: Path, tmp_path: Path) -> None:
    """A tokenizer.json is read before a SentencePiece model that is not known to be Llama's."""
    frozen = (ASSETS / "tiny-llama" / "tokenizer.json").read_text()
    for name, has_json, is_pieces in (("LlamaTokenizer", True, True), (None, True, True), ("Other", True, False),
                                      ("Other", False, True)):  # fmt: skip
        (tmp_path / "tokenizer.json").unlink(missing_ok=True)
        if has_json:
            (tmp_path / "tokenizer.json").write_text(frozen)
        own = llama_with(llama_folder, tmp_path, {} if name is None else {"tokenizer_class": name})
        assert (own.size == 340) is is_pieces, name
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(ModelError):
        open_tokenizer(folder)


def json_with(folder: Path, config: dict, extra: tuple[str, ...] = (), **changed: object) -> Tokenizer:
    frozen = json.loads((ASSETS / "tiny-llama" / "tokenizer.json").read_text()) | changed
    (folder / "tokenizer.json").write_text(json.dumps(frozen))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return open_tokenizer(folder, extra=extra)


def test_what_a_tokenizer_json_says(tmp_path: Path) -> None:
    """BOS as the configuration has it or, without that, as the tokenizer adds it; every change has its fingerprint."""
    bos = {"bos_token": {"content": "<s>"}}
    plain = json_with(tmp_path, {"bos_token": "<s>"}, post_processor=None)
    begins = json_with(tmp_path, {"bos_token": "<s>"})
    assert (plain.bos, begins.bos, json_with(tmp_path, {}).bos) == (None, 1, None)
    assert json_with(tmp_path, {**bos, "add_bos_token": True}, post_processor=None).bos == 1
    assert json_with(tmp_path, {**bos, "add_bos_token": False}).bos is None
    more = json_with(tmp_path, bos, ("</s>", IM_START))
    assert (more.special("</s>"), more.special(IM_START)) == (2, begins.size) and more.size == begins.size + 1
    assert len({own.fingerprint for own in (plain, begins, more)}) == 3
    assert not plain.legacy and json_with(tmp_path, bos, normalizer={"type": "Prepend", "prepend": "x"}).legacy
    assert more.decode([token.id for token in more.encode(f"red{IM_START} a")]).split() == ["red", "a"]
    assert [more.name(token) for token in (1, begins.size, 3)] == ["<s>", IM_START, None]


def test_which_tokenizers_put_a_space_before_the_first_word_alone(tmp_path: Path) -> None:
    """Those that say so, and those that are not legacy; others also put it after a special token."""
    for scheme, config, is_alone in (("first", {}, True), ("always", {"legacy": False}, True), ("always", {}, False)):
        space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": True}
        each = json_with(tmp_path, config, pre_tokenizer=space)
        first, after = ([token.id for token in each.encode(text)] for text in ("red", "</s>red"))
        assert (after[1:] == first) is not is_alone, (scheme, config)
