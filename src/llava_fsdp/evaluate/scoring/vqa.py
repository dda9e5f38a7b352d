"""Short answers against several people's: the rules of VQAv2's evaluation and of EvalAI's preparation of answers.

The rules, their order and their oddities are those of vqaEval.py (github.com/GT-Vision-Lab/VQA) and of the
EvalAIAnswerProcessor that LLaVA, MMF and lmms-eval use (llava/eval/m4c_evaluator.py); `docs/evaluation.md` lists
them.
"""

import re
from collections.abc import Sequence
from types import MappingProxyType

PUNCTUATION = ';/[]"{}()=+\\_->@<`,?!'
PERIOD = re.compile(r"\.(?!\d)")
MOST_PERIODS = 32
"""The official code hands re.UNICODE, which is 32, to where the number of replacements goes."""
COMMA_IN_NUMBER = re.compile(r"\d,\d")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
WORDS = {word: str(number) for number, word in enumerate(NUMBERS)} | {"none": "0"}
ARTICLES = frozenset({"a", "an", "the"})
ENOUGH = 3
"""People whose agreement makes an answer wholly right."""

WHOLE = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
    he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't needn't
    not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll
    somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd
    there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll
    what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't
    would've wouldn't wouldn't've y'all y'all'd've y'all'll you'd you'd've you'll you're you've
"""
"""As they should be written. A word is mended to one of these where exactly one of its apostrophes is missing."""
AGAINST_THE_RULE = {"somebody'd": "somebodyd"}
"""The official table has this one the wrong way round; an answer and its references suffer it alike."""


def lacking_one(whole: str) -> list[str]:
    """The word without its first apostrophe, without its second, and so on."""
    return [whole[:n] + whole[n + 1 :] for n, sign in enumerate(whole) if sign == "'"]


MENDED = MappingProxyType(
    {lacking: whole for whole in WHOLE.split() for lacking in lacking_one(whole)} | AGAINST_THE_RULE
)
"""From a word as found to the word as compared. The official table also has forms of I'd've, I'm and I've with a
capital I, which are never found there, as words are lower-cased before; they are left out."""


def vqa_accuracy(answer: str, references: Sequence[str]) -> float:
    """From 0 to 1: what VQAv2 gives an answer that is submitted as LLaVA submits it, prepared by `prepare_submission`.

    With fewer than four references, as a file of one answer each has, no answer could ever be wholly right; there it
    is 1 where the answer is one of them, both normalised, and else 0.
    """
    if len(references) <= ENOUGH:
        return float(normalize_vqa(prepare_submission(answer)) in {normalize_vqa(r) for r in references})
    return official_accuracy(prepare_submission(answer), references)


def official_accuracy(answer: str, references: Sequence[str]) -> float:
    """VQAv2's accuracy of an answer as it is handed in.

    Where all references are the same text, neither side is normalised: `Yes` is wrong to ten times `yes`.
    """
    answer, references = one_line(answer), [one_line(r) for r in references]
    if len(set(references)) > 1:
        answer, references = normalize_vqa(answer), [normalize_vqa(r) for r in references]
    return leave_one_out(answer, references)


def is_out_of_reach(references: Sequence[str]) -> bool:
    """Whether no answer can match by `vqa_accuracy`: all references are one text, which is then compared as it was
    written, and which preparing changes, as `four` to `4`."""
    written = {one_line(r) for r in references}
    return len(references) > ENOUGH and len(written) == 1 and not written & {prepare_submission(r) for r in written}


def textvqa_accuracy(answer: str, references: Sequence[str]) -> float:
    """From 0 to 1, as LLaVA scores TextVQA: everything is prepared as for a submission, whatever the references."""
    return leave_one_out(prepare_submission(answer), [prepare_submission(r) for r in references])


def leave_one_out(answer: str, references: Sequence[str]) -> float:
    """The mean, over leaving out each reference in turn, of min(1, matches among the others / 3)."""
    if not references:
        raise ValueError("an answer without references has no accuracy")
    matches = sum(r == answer for r in references)
    shares = [min(1.0, (matches - (r == answer)) / ENOUGH) for r in references]
    return sum(shares) / len(shares)


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 where the answer is one of the references, without regard to case and surrounding white space; else 0."""
    return float(answer.strip().lower() in {r.strip().lower() for r in references})


def normalize_vqa(text: str) -> str:
    """An answer as VQAv2's evaluation compares it: without punctuation and articles, digits for number words."""
    return plain_words(without_punctuation(one_line(text)))


def prepare_submission(text: str) -> str:
    """An answer as it is sent to EvalAI: lower case, no comma and no question mark, `'s` a word of its own, and then
    as `normalize_vqa` has it."""
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    return plain_words(without_punctuation(one_line(text)))


def one_line(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()


def without_punctuation(text: str) -> str:
    """A sign is taken out where it stands beside a space anywhere in the text, or where a number has a comma; else it
    becomes a space. Periods go, except before a digit; apostrophes, colons and the like stay."""
    numbered = COMMA_IN_NUMBER.search(text) is not None
    left = text
    for sign in PUNCTUATION:
        beside_space = f"{sign} " in text or f" {sign}" in text
        left = left.replace(sign, "" if numbered or beside_space else " ")
    return PERIOD.sub("", left, count=MOST_PERIODS)


def plain_words(text: str) -> str:
    words = [WORDS.get(word, word) for word in text.lower().split()]
    return " ".join(MENDED.get(word, word) for word in words if word not in ARTICLES)
