"""Writes the table of whole models in docs/models.md, from what the tests found:

    ./launch/test.sh --any --junitxml=FILE.xml
    python docs/make_models.py FILE.xml

The first keeps what each test of tests/any found. The second puts it into tests/any/found.json, where what other tests
have found earlier stays, and from there into the page. Without a file only the page is written.
"""

import json
import sys
from collections.abc import Iterable
from xml.etree import ElementTree

from pages import DOCS, code, replaced, table

TESTS = DOCS.parent / "tests"
sys.path.insert(0, str(TESTS / "support"))
from family_table import FAMILIES  # noqa: E402
from video_families import REFUSED_VIDEOS  # noqa: E402
from whole_models import NO_CHAT, PADDED, WHOLE  # noqa: E402

FOUND = TESTS / "any" / "found.json"
STEPS = "test_steps_of_adamw_are_those_of_a_plain_loop"
COLUMNS = {
    "test_ids_are_the_processors_and_labels_the_answers_with_their_ends": "ids and labels",
    "test_what_is_read_is_what_transformers_reads": "weights",
    "test_loss_and_gradients_of_a_row_are_the_sum_over_its_samples": "gradients",
    "test_a_rank_without_images_trains_with_one_that_has_some": "two ranks",
    f"{STEPS}-full": "steps",
    f"{STEPS}-lora": "LoRA",
    f"{STEPS}-qlora": "QLoRA",
    "test_ranks_train_as_a_plain_loop_does-zero2": "`zero2`",
    "test_ranks_train_as_a_plain_loop_does-zero3": "`zero3`",
    "test_ranks_train_as_a_plain_loop_does-hybrid": "`hybrid`",
    "test_a_stopped_run_continues_on_another_number_of_ranks": "resume",
    "test_an_export_is_the_trained_model_for_transformers": "export",
    "test_answers_are_those_of_transformers": "chat",
    "test_answers_of_validations_are_those_of_transformers": "validation",
    "test_ids_of_videos_are_the_processors_and_labels_the_answers": "videos",
    "test_loss_and_gradients_with_videos_are_the_sum_over_the_samples": "videos",
    "test_ranks_with_a_video_an_image_and_text_alone_train_together": "videos",
    "test_an_export_answers_videos_in_chat_as_transformers_generate": "videos",
}
"""{test, or test and one of its parameters: the column of the table}."""
NAMES = tuple(dict.fromkeys(COLUMNS.values()))
TYPES = {"pixtral_llava": "`llava` with a `pixtral` tower"}
"""{name of a family: what the table calls it, if it is not its type alone}."""


def read_reports(paths: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return {family: {column: `equal` or `differs`}} for the tests in reports of pytest in the form of JUnit."""
    found: dict[str, dict[str, str]] = {name: {} for name in WHOLE}
    for case in (case for path in paths for case in ElementTree.parse(path).iter("testcase")):
        test, _, own = case.attrib["name"].partition("@")[0].rstrip("]").partition("[")
        values = own.split("-")
        families = [value for value in values if value in found]
        columns = [COLUMNS[key] for key in (test, *(f"{test}-{value}" for value in values)) if key in COLUMNS]
        if columns and families and case.find("skipped") is None:
            fails = case.find("failure") is not None or case.find("error") is not None
            cells, column = found[families[0]], columns[0]
            if cells.get(column) != "differs":
                cells[column] = "differs" if fails else "equal"
    return found


def videos_of(name: str) -> dict[str, str]:
    """Return what is said of the videos of a family without videos, or whose are refused; empty for others."""
    if not FAMILIES[name].video:
        return {"videos": "takes none"}
    return {"videos": f"refused: {REFUSED_VIDEOS[name]}"} if name in REFUSED_VIDEOS else {}


def result_of(cells: dict[str, str]) -> str:
    """Return what the comparisons of a family found, in words."""
    others = [f"{column} ({cell})" for column, cell in cells.items() if cell != "equal"]
    return f"all but {'; '.join(others)}" if others else "all"


def block() -> str:
    """The table: a row for all families of which the same was found."""
    found = json.loads(FOUND.read_text())
    groups: dict[tuple[str, str], list[str]] = {}
    for name in WHOLE:
        rows = f"padded: {PADDED[name]}" if name in PADDED else "packed"
        groups.setdefault((rows, result_of(found[name] | videos_of(name))), []).append(name)
    lines = [(", ".join(TYPES.get(name) or code(name) for name in names), *cells) for cells, names in groups.items()]
    lines.append((", ".join(map(code, NO_CHAT)), "refused: its processor takes no conversation", ""))
    return table(["type of the model", "rows", "equal"], lines)


def page() -> str:
    return replaced((DOCS / "models.md").read_text(), "whole models", block())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        before, now = json.loads(FOUND.read_text()), read_reports(sys.argv[1:])
        made = {name: dict.fromkeys(NAMES, "not run") | before.get(name, {}) | now[name] for name in WHOLE}
        FOUND.write_text(json.dumps(made, indent=1) + "\n")
    (DOCS / "models.md").write_text(page())
