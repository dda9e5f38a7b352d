"""Contractions that VQA's evaluation mends: data, and the rule that makes its table of them."""

from types import MappingProxyType

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
