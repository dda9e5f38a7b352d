"""Score answers to a benchmark's questions: pure functions of texts, without torch and transformers.

Multiple choice is scored like LLaVA's eval_science_qa.py, yes-no answers like POPE (LLaVA's eval_pope.py), and short
answers by VQAv2's evaluation and EvalAI's preparation of answers. For short answers the rules, their order and their
oddities are those of vqaEval.py (github.com/GT-Vision-Lab/VQA) and of the class EvalAIAnswerProcessor in LLaVA, MMF and
lmms-eval (llava/eval/m4c_evaluator.py); `docs/evaluation.md` lists them.

In all functions, `references` are the right answers to a question, one by each annotator.
"""

import functools
import re
from collections import Counter
from collections.abc import Sequence

LETTERS = "ABCDE"
SENTENCE = re.compile(r"The answer is ([A-Z]).")
"""A sentence that names a choice by its letter. As in the original LLaVA, the final `.` matches any character."""
NEGATIONS = frozenset({"No", "no", "not"})
PUNCTUATION = ';/[]"{}()=+\\_->@<`,?!'
PERIOD = re.compile(r"\.(?!\d)")
MOST_PERIODS = 32
"""Maximum number of periods removed from an answer. VQAv2's code has this limit by mistake: it passes re.UNICODE, whose
value is 32, as the argument `count`."""
COMMA_IN_NUMBER = re.compile(r"\d,\d")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
WORDS = {word: str(number) for number, word in enumerate(NUMBERS)} | {"none": "0"}
ARTICLES = frozenset({"a", "an", "the"})
ENOUGH = 3
"""Number of annotators who must agree with the model for an accuracy of 1."""

SPELLED_OUT = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
    he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't needn't
    not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll
    somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd
    there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll
    what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't
    would've wouldn't wouldn't've y'all y'all'd've y'all'll you'd you'd've you'll you're you've
"""
"""Contractions with all their apostrophes. A word that lacks one apostrophe of a contraction, and equals it otherwise,
is replaced by it."""
AGAINST_THE_RULE = {"somebody'd": "somebodyd"}
"""A replacement that VQAv2's table has in the wrong direction: it removes the apostrophe."""


def named_choice(answer: str, choices: int) -> str | None:
    """Return the letter that an answer to a multiple-choice question names; None if it names none.

    It names a choice if it is a letter alone (`B`), if it begins with a letter, a period and a space (`B. a cat`), or
    if it contains `The answer is B.` exactly once. Others, such as `(B)`, `B.`, `b` or the choice's text, name none.

    Args:
        choices: number of choices of the question; letters after the last choice name no choice.
    """
    if answer[:1] in tuple(LETTERS) and answer[1:3] in ("", ". "):
        named = [answer[0]]
    else:
        named = SENTENCE.findall(answer)
    return named[0] if len(named) == 1 and named[0] in LETTERS[:choices] else None


def says_yes(answer: str) -> bool:
    """Return whether an answer to a yes-no question counts as yes: if its first sentence contains neither `No` nor `no`
    nor `not`. So `NO`, `Maybe` and an empty answer count as yes."""
    sentence = answer.partition(".")[0].replace(",", "")
    return NEGATIONS.isdisjoint(sentence.split(" "))


def score_yes_no(answers: Sequence[bool], right: Sequence[bool]) -> dict[str, float]:
    """Return scores of yes-no answers by name, with yes as the positive class; True is yes.

    `yes_ratio` is the share of answers that are yes. A rate whose divisor is 0 is 0; the original LLaVA fails there.
    """
    counts = Counter(zip(answers, right, strict=True))
    true_yes, false_yes = counts[True, True], counts[True, False]
    true_no, false_no = counts[False, False], counts[False, True]
    return {
        "accuracy": rate(true_yes + true_no, len(answers)),
        "precision": rate(true_yes, true_yes + false_yes),
        "recall": rate(true_yes, true_yes + false_no),
        "f1": rate(2 * true_yes, 2 * true_yes + false_yes + false_no),
        "yes_ratio": rate(true_yes + false_yes, len(answers)),
        "true_yes": true_yes,
        "false_yes": false_yes,
        "true_no": true_no,
        "false_no": false_no,
    }


def rate(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


CONTRACTIONS = {
    whole[:index] + whole[index + 1 :]: whole
    for whole in SPELLED_OUT.split()
    for index, sign in enumerate(whole)
    if sign == "'"
} | AGAINST_THE_RULE
"""Word -> its replacement before answers are compared. VQAv2's entries for I'd've, I'm and I've are left out: they have
a capital I and never match, since words are lower-cased first."""


def vqa_accuracy(answer: str, references: Sequence[str]) -> float:
    """Return VQAv2's accuracy, 0 to 1, after normalising the answer as LLaVA does before it is submitted.

    With fewer than four references VQAv2's formula cannot reach 1. Then answer and references are normalised, and the
    accuracy is 1 if the answer equals a reference, and else 0.
    """
    if len(references) <= ENOUGH:
        return float(normalize_vqa(prepare_submission(answer)) in {normalize_vqa(r) for r in references})
    return official_accuracy(prepare_submission(answer), references)


def official_accuracy(answer: str, references: Sequence[str]) -> float:
    """Return VQAv2's accuracy, 0 to 1, as its own evaluation computes it: answer and references are compared without
    punctuation and articles, but unchanged if all references are equal (`Yes` is wrong for ten `yes`)."""
    answer, references = one_line(answer), [one_line(r) for r in references]
    if len(set(references)) > 1:
        answer, references = normalize_vqa(answer), [normalize_vqa(r) for r in references]
    return leave_one_out(answer, references)


def textvqa_accuracy(answer: str, references: Sequence[str]) -> float:
    """Return LLaVA's accuracy on TextVQA, 0 to 1, after normalising answer and references as LLaVA does before answers
    are submitted."""
    return leave_one_out(prepare_submission(answer), [prepare_submission(r) for r in references])


def leave_one_out(answer: str, references: Sequence[str]) -> float:
    """Return VQAv2's accuracy, 0 to 1: each reference is left out in turn, and the mean of min(1, matches / 3) is
    taken, where `matches` counts those of the others that equal the answer. Raise ValueError without references."""
    if not references:
        raise ValueError("an answer without references has no accuracy")
    matches = sum(r == answer for r in references)
    shares = [min(1.0, (matches - (r == answer)) / ENOUGH) for r in references]
    return sum(shares) / len(shares)


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the answer equals a reference, except for case and surrounding white space; else 0."""
    return float(answer.strip().lower() in {r.strip().lower() for r in references})


@functools.lru_cache(1 << 16)
def normalize_vqa(text: str) -> str:
    """Normalise an answer as VQAv2's evaluation does: no punctuation, no articles, digits for number words."""
    return plain_words(without_punctuation(one_line(text)))


@functools.lru_cache(1 << 16)
def prepare_submission(text: str) -> str:
    """Normalise an answer as LLaVA does for EvalAI's server: lower case, without commas and question marks, `'s`
    separated from its word by a space, and then as VQAv2's evaluation."""
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    return plain_words(without_punctuation(one_line(text)))


def one_line(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()


def without_punctuation(text: str) -> str:
    """Remove punctuation by VQAv2's rules. A sign (such as `;`, `/` or `?`) is removed everywhere if it stands beside a
    space anywhere in the text, or if the text has a number with a comma; otherwise it becomes a space. Periods are
    removed except before a digit. Apostrophes and colons stay."""
    numbered = COMMA_IN_NUMBER.search(text) is not None
    left = text
    for sign in PUNCTUATION:
        beside_space = f"{sign} " in text or f" {sign}" in text
        left = left.replace(sign, "" if numbered or beside_space else " ")
    return PERIOD.sub("", left, count=MOST_PERIODS)


def plain_words(text: str) -> str:
    words = [WORDS.get(word, word) for word in text.lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)
