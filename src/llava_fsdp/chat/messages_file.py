"""Read the conversation that `chat messages=FILE` goes on with: one record of docs/data.md that ends with a question or
the result of a call."""

from dataclasses import replace
from pathlib import Path

from llava_fsdp.chat.answerer import Question
from llava_fsdp.data.images.check import inline_images
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.forms.parse_record import parse_record
from llava_fsdp.data.records.record import READS_IMAGES, Turn, parse_text, unread_reason
from llava_fsdp.data.text.conversation import asked_turns, check_turns
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.files.safe_load import LARGE, read_text


def read_messages_file(path: Path) -> Question:
    """Return the conversation in a JSON file, which ends with a question. Image paths are relative to its folder.

    Raises:
        ConfigError: the path is not a file.
        DataError: the file has no record; the record ends with an answer; its turns, images or calls of tools are
            wrong; it has media that cannot be read; or an image does not exist.
    """
    if not path.is_file():
        raise ConfigError(f"messages={path} is not a file; name a JSON file with one conversation")
    content = read_text(path, DataError, LARGE).encode()
    record = parse_record(path, 0, parse_text(path, 0, content), videos=True)
    if record.unread is not None:
        raise DataError(unread_reason(record.where, record.unread), Kind.media_not_read)
    if not record.turns or record.turns[-1].role not in READS_IMAGES:
        raise DataError(
            f"{record.where}: its last turn must be a question (role user) or the result of a call (role tool); add "
            "one, or take the last answer out",
            Kind.odd_turns,
        )
    # `check_turns` requires an answer to the last question
    check_turns(replace(record, turns=(*record.turns, Turn("gpt", ""))))
    inline = inline_images(record)
    files = [inline.get(name) or path.parent / name for name in record.images]
    missing = next((file for file in files if isinstance(file, Path) and not file.is_file()), None)
    if missing is not None:  # now, and not once the model is loaded
        raise DataError(f"{record.where}: image {missing} does not exist", Kind.image_missing)
    return Question(list(asked_turns(record)), files, record.where, record.tools)
