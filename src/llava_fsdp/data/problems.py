"""The kinds of problems that a record of a dataset can have, and whether such a record is still trained on."""

from dataclasses import dataclass
from enum import Enum, StrEnum

from llava_fsdp.config import Parity, TooLong


class Kind(StrEnum):
    not_json = "not_json"
    not_utf8 = "not_utf8"
    record_too_large = "record_too_large"
    bad_form = "bad_form"
    media_not_read = "media_not_read"
    wrong_roles = "wrong_roles"
    odd_turns = "odd_turns"
    chat_template = "chat_template"
    empty_answer = "empty_answer"
    image_count = "image_count"
    tag_without_image = "tag_without_image"
    image_missing = "image_missing"
    image_empty = "image_empty"
    image_truncated = "image_truncated"
    image_unreadable = "image_unreadable"
    image_bomb = "image_bomb"
    image_shape = "image_shape"
    path_outside = "path_outside"
    url = "url"
    images_unset = "images_unset"
    duplicate_id = "duplicate_id"
    special_token = "special_token"
    no_labels = "no_labels"
    too_long = "too_long"
    key_not_obeyed = "key_not_obeyed"


class Kept(Enum):
    """The settings under which a record that has a certain problem is still trained on."""

    no = "no"
    yes = "yes"
    like_original = "with labels=llava_v1_5"
    """The record is trained on with `labels=llava_v1_5`, as LLaVA does, but not with `labels=exact`."""
    truncated = "with data.too_long=truncate"


@dataclass(frozen=True)
class Problem:
    meaning: str
    kept: Kept


PROBLEMS: dict[Kind, Problem] = {
    Kind.not_json: Problem("a line of a JSON Lines file is not JSON", Kept.no),
    Kind.not_utf8: Problem("its bytes are not UTF-8", Kept.no),
    Kind.record_too_large: Problem("more bytes than data.max_record_bytes", Kept.no),
    Kind.bad_form: Problem("an object of none of the forms of a record, or of two", Kept.no),
    Kind.media_not_read: Problem(
        "it names video, audio or images in a key or a tag that is not read", Kept.like_original
    ),
    Kind.wrong_roles: Problem(
        "human and gpt do not take turns, a call has no result, or a system turn is not the first", Kept.no
    ),
    Kind.odd_turns: Problem("no turns, or the last question has no answer", Kept.no),
    Kind.chat_template: Problem("the model's own chat template refuses it, or changes what its turns say", Kept.no),
    Kind.empty_answer: Problem("an answer has no text", Kept.like_original),
    Kind.image_count: Problem("the number of <image> tags is not that of the images", Kept.no),
    Kind.tag_without_image: Problem("<image> in the text of a record without images", Kept.like_original),
    Kind.image_missing: Problem("the image does not exist", Kept.no),
    Kind.image_empty: Problem("the image's file has no bytes", Kept.no),
    Kind.image_truncated: Problem("the image's file ends before the image does", Kept.no),
    Kind.image_unreadable: Problem("the image cannot be read", Kept.no),
    Kind.image_bomb: Problem(
        "the image has more pixels than the limit, or a structure that takes far more work than its size tells", Kept.no
    ),
    Kind.image_shape: Problem("the image is too narrow or too flat to be made a square", Kept.no),
    Kind.path_outside: Problem("the image's path leaves the folder of images", Kept.no),
    Kind.url: Problem("the image is an address on the net, which is never fetched", Kept.no),
    Kind.images_unset: Problem("it has an image, and no folder of images is set", Kept.no),
    Kind.duplicate_id: Problem("an earlier record of the same source has its id", Kept.yes),
    Kind.special_token: Problem("a special token of the tokenizer in its text; see data.special_tokens", Kept.yes),
    Kind.no_labels: Problem("no label: masked, or cut before the first answer", Kept.like_original),
    Kind.too_long: Problem("longer than data.max_length", Kept.truncated),
    Kind.key_not_obeyed: Problem(
        "a key says what is learnt, and cannot be obeyed: a weight above 1 or of a question, a thought with "
        "data.thoughts=refuse, a rejected answer",
        Kept.no,
    ),
}

BITS: dict[Kind, int] = {kind: 1 << place for place, kind in enumerate(Kind)}
"""The bit of each kind of problem in the `flags` columns of a dataset's index."""


def is_kept(kind: Kind, labels: Parity, too_long: TooLong) -> bool:
    """Return whether a record that has a certain kind of problem is trained on. Whether it is may depend on the
    settings `labels` and `data.too_long`."""
    match PROBLEMS[kind].kept:
        case Kept.like_original:
            return labels is Parity.llava_v1_5
        case Kept.truncated:
            return too_long is TooLong.truncate
        case kept:
            return kept is Kept.yes


def mask(*kinds: Kind) -> int:
    """Return an integer with the bits of the kinds set."""
    return sum(BITS[kind] for kind in kinds)
