"""Scores of answers: pure functions of texts, without torch or transformers.

Multiple choice is scored like LLaVA's eval_science_qa.py, yes-no answers like POPE (LLaVA's eval_pope.py), and short
answers by VQAv2's evaluation and EvalAI's preparation of answers. Their rules, order and oddities are those of
vqaEval.py (github.com/GT-Vision-Lab/VQA) and of the EvalAIAnswerProcessor that LLaVA, MMF and lmms-eval use
(llava/eval/m4c_evaluator.py); `docs/evaluation.md` lists them.
"""

import re
from collections import Counter
from collections.abc import Sequence

LETTERS = "ABCDE"
SENTENCE = re.compile(r"The answer is ([A-Z]).")
"""Pattern of an answer's sentence that names a letter; as in the original, any one character must follow the letter."""
NEGATIONS = frozenset({"No", "no", "not"})
PUNCTUATION = ';/[]"{}()=+\\_->@<`,?!'
PERIOD = re.compile(r"\.(?!\d)")
MOST_PERIODS = 32
"""Most periods removed from an answer: the official code passes re.UNICODE, which is 32, as that number."""
COMMA_IN_NUMBER = re.compile(r"\d,\d")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
WORDS = {word: str(number) for number, word in enumerate(NUMBERS)} | {"none": "0"}
ARTICLES = frozenset({"a", "an", "the"})
ENOUGH = 3
"""Number of people who must agree with an answer for an accuracy of 1."""

WHOLE = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
    he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't needn't
    not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll
    somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd
    there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll
    what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't
    would've wouldn't wouldn't've y'all y'all'd've y'all'll you'd you'd've you'll you're you've
"""
"""Contractions with their apostrophes. A word that lacks exactly one apostrophe of a contraction is replaced by it."""
AGAINST_THE_RULE = {"somebody'd": "somebodyd"}
"""Replacement that the official table has the wrong way round, for answers and references alike."""


def chosen(answer: str, choices: int) -> str | None:
    """Return the letter of the choice that an answer names; None if it names no choice.

    A choice is named by a letter alone (`B`), by a letter before a period and a space (`B. a cat`), or by `The answer
    is B.` anywhere, but only once. Other forms, such as `(B)`, `B.`, `b` or the choice's own words, name none.

    Args:
        choices: number of choices; letters beyond them name no choice.
    """
    if answer[:1] in tuple(LETTERS) and answer[1:3] in ("", ". "):
        named = [answer[0]]
    else:
        named = SENTENCE.findall(answer)
    return named[0] if len(named) == 1 and named[0] in LETTERS[:choices] else None


def says_yes(answer: str) -> bool:
    """Return whether an answer counts as yes: its first sentence has none of the words No, no and not. `NO`, an empty
    answer and `Maybe` count as yes."""
    sentence = answer.partition(".")[0].replace(",", "")
    return NEGATIONS.isdisjoint(sentence.split(" "))


def score_yes_no(answers: Sequence[bool], right: Sequence[bool]) -> dict[str, float]:
    """Compute rates and counts of yes-no answers (True is yes) with yes as the positive class.

    `yes_ratio` is the share of answers that say yes. A rate whose divisor is 0 is 0, where the original fails.
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
    whole[:place] + whole[place + 1 :]: whole
    for whole in WHOLE.split()
    for place, sign in enumerate(whole)
    if sign == "'"
} | AGAINST_THE_RULE
"""Replacements of words by contractions before comparison. The official table's forms of I'd've, I'm and I've are left
out: they have a capital I, and words are lower-cased before."""


def vqa_accuracy(answer: str, references: Sequence[str]) -> float:
    """Compute VQAv2's accuracy of an answer, 0 to 1, after preparing it for submission as LLaVA does. Of fewer than
    four references, none of which could give 1 then, it must equal one, both normalised."""
    if len(references) <= ENOUGH:
        return float(normalize_vqa(prepare_submission(answer)) in {normalize_vqa(r) for r in references})
    return official_accuracy(prepare_submission(answer), references)


def official_accuracy(answer: str, references: Sequence[str]) -> float:
    """Compute VQAv2's accuracy of an answer, 0 to 1, without preparing it for submission. If all references are one
    text, neither side is normalised: `Yes` is wrong to ten times `yes`."""
    answer, references = one_line(answer), [one_line(r) for r in references]
    if len(set(references)) > 1:
        answer, references = normalize_vqa(answer), [normalize_vqa(r) for r in references]
    return leave_one_out(answer, references)


def textvqa_accuracy(answer: str, references: Sequence[str]) -> float:
    """Compute LLaVA's accuracy of an answer on TextVQA, 0 to 1; references are prepared like the answer."""
    return leave_one_out(prepare_submission(answer), [prepare_submission(r) for r in references])


def leave_one_out(answer: str, references: Sequence[str]) -> float:
    """Compute the mean, over leaving out each reference in turn, of min(1, matching references / 3)."""
    if not references:
        raise ValueError("an answer without references has no accuracy")
    matches = sum(r == answer for r in references)
    shares = [min(1.0, (matches - (r == answer)) / ENOUGH) for r in references]
    return sum(shares) / len(shares)


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the answer equals a reference, except for case and surrounding white space; else 0."""
    return float(answer.strip().lower() in {r.strip().lower() for r in references})


def normalize_vqa(text: str) -> str:
    """Normalise an answer as VQAv2's evaluation does: no punctuation or articles, digits for number words."""
    return plain_words(without_punctuation(one_line(text)))


def prepare_submission(text: str) -> str:
    """Prepare an answer for EvalAI's server: lower case, no commas and question marks, `'s` as its own word, then
    normalised as by VQAv2's evaluation."""
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    return plain_words(without_punctuation(one_line(text)))


def one_line(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()


def without_punctuation(text: str) -> str:
    """Remove punctuation by VQAv2's rules: a sign that stands beside a space anywhere in the text is removed
    everywhere, and every sign if a number has a comma; other signs become spaces. Periods are removed, except before a
    digit; apostrophes, colons and the like stay."""
    numbered = COMMA_IN_NUMBER.search(text) is not None
    left = text
    for sign in PUNCTUATION:
        beside_space = f"{sign} " in text or f" {sign}" in text
        left = left.replace(sign, "" if numbered or beside_space else " ")
    return PERIOD.sub("", left, count=MOST_PERIODS)


def plain_words(text: str) -> str:
    words = [WORDS.get(word, word) for word in text.lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)
