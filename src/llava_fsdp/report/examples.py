"""Build the part of a dataset's report page that shows some samples as a model is trained on them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape

from llava_fsdp.report.charts.html import shorten_middle
from llava_fsdp.runtime.text.terminal_text import shown_name, shown_text

NAME_LENGTH = 200
NEWLINE = "\u23ce"
"""Character that shows a line break of the text."""
EXPLANATION = (
    "Drawn at random from all sources, and the same at each call. Each is shown as a training reads it: its text "
    "after the template and the tokenizer, token by token, and its images as the vision tower gets them. The loss is "
    "computed on the <mark><i>underlined</i> <i>tokens</i></mark>, in blocks <strong>with labels</strong>. "
    "A question's block also holds the template's own text before and after it. "
    f"<i class=special>A frame</i> is around special tokens, and {NEWLINE} is a line break."
)


COLOURS = {"thought": "#8a63d2", "calls": "#d97706", "text": "#2563eb"}
"""{part of an answer: colour of the line beside it}."""


@dataclass(frozen=True)
class Text:
    """Consecutive text tokens of a sample. The loss is computed on all of them (they are labels), or on none."""

    role: str
    """Who wrote the text, such as `human`; empty if not known."""
    has_labels: bool
    count: int
    """Number of tokens."""
    pieces: list[tuple[str, bool]]
    """For each token: its text, and whether it is a special token."""
    kind: str = "other"
    """What part of an answer it is: thought, calls or text, each shown in a colour of its own; or other."""


@dataclass(frozen=True)
class Images:
    """The tokens of one image or one video of a sample, with thumbnails."""

    title: str
    """Such as `image 1`."""
    name: str
    count: int
    """Number of tokens."""
    tile: str
    """Word for a tile: `tile`, or `frame` of a video."""
    tiles: list[str]
    """Thumbnails as data: URLs, in order."""
    note: str = ""
    """Why thumbnails are missing; empty if there are all."""
    side: int = 160
    """Width and height of a thumbnail in pixels; it is shown smaller, for screens of high resolution."""


@dataclass(frozen=True)
class Gap:
    """Tokens that are left out because the sample is long, with the numbers of labels and images among them."""

    count: int
    labels: int
    images: int


@dataclass(frozen=True)
class Example:
    source: str
    file: str
    line: int | None
    index: int
    id: str | None
    length: int = 0
    """Number of tokens after truncation, including image tokens."""
    labels: int = 0
    parts: tuple[Text | Images | Gap, ...] = ()
    cut: int = 0
    """Number of tokens that truncation has removed."""
    labels_cut: int = 0
    images_cut: int = 0
    error: str = ""
    """Why the record cannot be shown; else empty."""


def examples_body(examples: list[Example]) -> Iterator[str]:
    """Yield the HTML of some samples, after a text that explains how tokens are marked."""
    if not examples:
        yield "<p>There are no samples.</p>\n"
        return
    yield f"<p class=note>{EXPLANATION}</p>\n"
    for number, example in enumerate(examples, start=1):
        yield example_body(number, example)


def example_body(number: int, example: Example) -> str:
    """Return a sample of a dataset as HTML: its record, the parts that the model gets, and what truncation cuts off."""
    line = "" if example.line is None else f", line {example.line:,}"
    identity = "without an id" if example.id is None else f"id {name_html(example.id)}"
    title = f"{number}. {name_html(example.source)}: record {example.index:,}{line}, {identity}"
    counts = f"{example.length:,} tokens, {example.labels:,} with labels"
    body = [part_body(part) for part in example.parts]
    if example.cut:  # images are only named if some are cut off
        what_is_lost = [
            plural(example.labels_cut, "label"),
            *[plural(example.images_cut, "image")][: example.images_cut],
        ]
        cut = f"data.max_length cuts off {plural(example.cut, 'token')} here, with {' and '.join(what_is_lost)}"
        body.append(f"<p class=cut>\u2702 {cut}.</p>\n")
    if example.error:
        counts, body = "", [f"<p class=reason>{escape(shown_text(example.error))}</p>"]
    return (
        f"<article class=example><h3>{title}</h3><p class=note>{name_html(example.file)}"
        f"{f' &middot; {counts}' if counts else ''}</p>\n{''.join(body)}</article>\n"
    )


def part_body(part: Text | Images | Gap) -> str:
    """Return a part of a sample as HTML: a text, an image's or video's tiles, or a line on omitted tokens (`Gap`)."""
    match part:
        case Gap():  # images are only named if there are some among the tokens
            what_is_hidden = [plural(part.labels, "label"), *[plural(part.images, "image")][: part.images]]
            hidden = f"{plural(part.count, 'token')} with {' and '.join(what_is_hidden)}"
            return f"<p class=cut>\u22ef {hidden} are not shown.</p>\n"
        case Images():
            tiles = len(part.tiles)
            total = f", {plural(tiles, part.tile)}" if tiles else ""
            # smaller than its pixels, for screens of high resolution
            size = f"width={part.side * 7 // 10}"
            names = [f"{part.tile} {number} of {tiles}" for number in range(1, tiles + 1)]
            shown = "".join(
                f"<img src='{url}' {size} alt='{tile} of {part.title}' title='{tile}'>"
                for tile, url in zip(names, part.tiles, strict=True)
            )
            note = f"<p class=note>{escape(shown_text(part.note))}</p>" if part.note else ""
            head = block_head(part.title, f"{plural(part.count, 'token')}{total}")
            body = f"<div><p class=note>{name_html(part.name)}</p>{shown}{note}</div>"
            return f"<div class='part pictures'>{head}{body}</div>\n"
        case Text():
            text = "".join(tokens_html(part.pieces))
            tokens = plural(part.count, "token")
            counts = f"<strong>{tokens} with labels</strong>" if part.has_labels else f"{tokens}, no labels"
            head = block_head(part.role or "text", counts)
            kind, tag = ("part labels", "mark") if part.has_labels else ("part", "span")
            colour = COLOURS.get(part.kind)
            style = "" if colour is None else f" style='border-left: 4px solid {colour}'"
            return f"<div class='{kind}'{style}>{head}<{tag} class=text>{text}</{tag}></div>\n"


def block_head(title: str, counts: str) -> str:
    return f"<p class=head><b>{escape(title)}</b> {counts}</p>"


def tokens_html(pieces: Iterable[tuple[str, bool]]) -> Iterator[str]:
    """Yield the HTML of text tokens, given as (text, whether it is a special token)."""
    for text, is_special in pieces:
        shown = escape(shown_text(text).replace("\n", f"{NEWLINE}\n"))
        yield f"<i class=special>{shown}</i>" if is_special else f"<i>{shown}</i>"


def name_html(text: str) -> str:
    """Return a name from a dataset, such as a file's, as HTML on one line."""
    return escape(shorten_middle(shown_name(text), NAME_LENGTH))


def plural(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"
