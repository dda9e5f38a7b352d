"""Parse the messages of a conversation: the values of the keys `conversations` and `messages` of a record.

In the functions, `what` and `where` name a value and the record in error messages, and `form` is a value's place in the
record, such as `messages[].`. A function raises DataError if the value that it parses is wrong.
"""

from dataclasses import replace
from typing import Any

from llava_fsdp.data.records.forms.record_reader import (
    GIVEN_AS,
    IMAGE_PARTS,
    VIDEO,
    VIDEO_GIVEN_AS,
    RecordReader,
    given_images,
)
from llava_fsdp.data.records.record import IMAGE_TAG, Call, Turn, is_empty, names_media
from llava_fsdp.data.records.tools import (
    CALLERS,
    RECORD_TOOLS,
    RESULT_KEYS,
    RESULTS,
    TOOL_KEYS,
    TURN_CALLS,
    has_no_tools,
    joined_calls,
    linked_results,
    read_call,
    read_calls,
    read_id,
)

TURN_KEYS = (("from", "value"), ("role", "content"))
"""Keys of a turn in `conversations` or `messages`: its speaker, and its text or (only `content`) a list of parts."""
SPEAKERS = {
    "human": "human", "user": "human",
    "gpt": "gpt", "assistant": "gpt", "model": "gpt", "chatgpt": "gpt", "bing": "gpt", "bard": "gpt",
    "system": "system",
}  # fmt: skip
"""{name of a speaker: role of a turn}. A turn whose speaker has another name keeps the name, and is refused later."""
MESSAGE_KEYS = frozenset([key for pair in TURN_KEYS for key in pair] + [*TOOL_KEYS])
"""Keys of a message that are read; those of TOOL_KEYS are refused where they have no place."""
THOUGHT_PARTS, CALL_PART, RESULT_PART = ("thinking", "reasoning"), "tool_use", "tool_result"
"""Types of the parts of a message that are no text and no media, as Anthropic writes them: thoughts and calls of an
answer, and the result of a call in the message after it."""
RESULT_IDS = ("tool_call_id", "tool_use_id", "id")
"""Keys of a message with the result of a call for the id of the call."""
HIDDEN_PART = "redacted_thinking"
"""Type of a part with an encrypted thought."""
AGENT_PART_KEYS = frozenset("type thinking reasoning text signature id name input tool_use_id content is_error "
                            "cache_control".split())  # fmt: skip
"""Keys of these parts that are read, or change nothing that is learnt."""
PART_KEYS = frozenset(["type", "text", "detail", "cache_control", *GIVEN_AS, *VIDEO_GIVEN_AS])
"""Keys of a part of a message that are read, or change nothing that is learnt."""


def read_messages(reader: RecordReader, key: str, raw: Any) -> list[Turn]:
    """Parse `raw`, the value of a record's key `key` (`conversations` or `messages`), into turns. Tool calls that are
    messages of their own become calls of the answer before them, and each tool result gets the call that it answers.
    `reader` makes the errors, and notes keys that cannot be obeyed."""
    if not isinstance(raw, list):
        raise reader.bad(key, raw, "a list of turns, each an object with from and value, or role and content")
    made = [
        turn
        for number, message in enumerate(raw)
        for turn in read_message(reader, f"turn {number}", message, f"{key}[].")
    ]
    if all(turn.role != "tool" and not turn.calls for turn in made):
        return made
    return linked_results(joined_calls(made, reader.bad, reader.note_key_not_obeyed), reader.turn_error)


def read_message(reader: RecordReader, what: str, raw: Any, form: str = "") -> list[Turn]:
    """Parse one message of `conversations` or `messages`. It becomes one turn; if it contains results of calls as
    parts, each of these becomes a turn before it.

    The role of a turn is `human`, `gpt` (an answer), `system`, `call` (a message that is nothing but calls of tools) or
    `tool` (the result of a call). A speaker with an unknown name becomes the role, which is refused later.

    Args:
        what: names the message in error messages.
        form: its place in the record, such as `messages[].`.
    """
    fields = raw if isinstance(raw, dict) else {}
    speakers = [name for key, _ in TURN_KEYS if isinstance(name := fields.get(key), str)]
    speaker = speakers[0] if speakers else ""
    role = "tool" if speaker in RESULTS else "call" if speaker in CALLERS else SPEAKERS.get(speaker) or speaker
    is_answer = role in ("gpt", "call")
    # an answer may have calls, but no list of tools; other messages have neither
    reader.refuse_tools(what, fields, RECORD_TOOLS if role == "gpt" else TOOL_KEYS)
    # the key of the message's text, beside the key of its speaker
    texts = [key for pair in TURN_KEYS if all(fields.get(field) is not None for field in pair) for key in pair[1:]]
    thought = reader.thought_of(what, fields) if is_answer else None
    calls = calls_of(reader, what, fields) if role == "gpt" else ()
    is_bare = not texts and bool(calls or thought is not None)  # an answer may have no text beside its calls
    if (len(texts) != 1 and not is_bare) or len(speakers) != 1:
        raise reader.bad(what, raw, "an object with from and value, or with role and content")
    reader.note_unread(fields)
    known = MESSAGE_KEYS | RESULT_KEYS if role == "tool" else MESSAGE_KEYS
    weights = reader.note_keys(what, fields, known, form, is_answer)
    content = "" if is_bare else fields[texts[0]]
    if role == "call":
        found = read_calls(what, content, reader.bad, reader.is_table)
        return [reader.weighted(what, Turn("call", "", thought=thought, calls=found), weights)]
    # the result gets a call that has only the name and the id of the call that it belongs to
    if role == "tool":
        name = reader.text(f"{what}, name", fields.get("name") or "")
        identity = next((fields[key] for key in RESULT_IDS if fields.get(key) is not None), None)
        calls = (Call(name, {}, read_id(what, identity, reader.bad)),)
    if texts != ["content"] or not isinstance(content, list):
        made = [Turn(role, reader.text(what, content), thought=thought, calls=calls)]
    else:
        made = read_content(reader, what, content, Turn(role, "", thought=thought, calls=calls), f"{form}content[].")
    return [*made[:-1], reader.weighted(what, made[-1], weights)] if is_answer else made


def read_content(reader: RecordReader, what: str, content: list[Any], turn: Turn, form: str) -> list[Turn]:
    """Parse a message whose content is a list of parts. Return the results of calls in it, each as a turn, and then the
    turn of the message itself, unless it has only results. A question may have results of calls, and an answer thoughts
    and calls, as parts of the types that Anthropic writes; all other parts are texts and media.

    Args:
        what: name of the message in error messages.
        content: the parts.
        turn: the message without its content.
        form: place of the parts in the record, such as `messages[].content[].`, for the names of unread keys.
    """
    texts, thoughts, results = list[str](), list[str](), list[Turn]()
    calls = list(turn.calls)
    for number, part in enumerate(content):
        part_name, kind = f"{what}, part {number}", part.get("type") if isinstance(part, dict) else None
        if kind == HIDDEN_PART:
            raise reader.bad(
                part_name, kind, "a thought that can be read, as an encrypted one cannot be learnt or shown"
            )
        if kind == RESULT_PART and turn.role == "human":
            if texts:
                raise reader.bad(part_name, kind, "before the other parts of its message")
            results.append(read_result(reader, part_name, part, form))
        elif kind in (*THOUGHT_PARTS, CALL_PART) and turn.role == "gpt":
            reader.note_part_weights(part_name, reader.note_keys(part_name, part, AGENT_PART_KEYS, form))
            if kind == CALL_PART:
                calls.append(read_call(part_name, part, reader.bad, reader.is_table))
            else:
                thoughts.append(reader.text(part_name, part.get(kind) or part.get("text") or ""))
        else:
            texts.append(read_part(reader, part_name, part, form=form, is_answer=turn.role == "gpt"))
    if results and not texts:
        return results
    thought = "".join(thoughts) if "".join(thoughts).strip() else None
    if None not in (thought, turn.thought) and thought != turn.thought:
        raise reader.bad(what, [turn.thought, thought], "an answer with one thought")
    text, parts = "".join(texts), tuple(texts) if texts else None
    made = replace(turn, text=text, parts=parts, thought=thought or turn.thought, calls=tuple(calls))
    return [*results, made]


def read_result(reader: RecordReader, what: str, raw: dict[str, Any], form: str) -> Turn:
    """Parse the result of a tool's call, a part of a message, into a turn. `what` names the part in error messages,
    `form` is its place in the record, such as `messages[].content[].`."""
    reader.note_keys(what, raw, AGENT_PART_KEYS, form, is_answer=False)
    content, parts = raw.get("content"), None
    if isinstance(content, list):
        parts = tuple(read_part(reader, f"{what}, part {number}", part, form) for number, part in enumerate(content))
        content = "".join(parts)
    text = reader.text(what, "" if content is None else content)
    identity = read_id(what, raw.get("tool_use_id"), reader.bad)
    # the result gets a call that has only the id of the call that it belongs to
    return Turn("tool", text, parts=parts, calls=(Call("", {}, identity),))


def calls_of(reader: RecordReader, what: str, raw: dict[str, Any]) -> tuple[Call, ...]:
    """Return the calls of an answer from its keys `tool_calls` and `function_call`."""
    given = [key for key in TURN_CALLS if not has_no_tools(raw.get(key))]
    if len(given) > 1:
        raise reader.bad(what, raw, f"an answer with one of {' and '.join(given)}")
    return tuple(call for key in given for call in read_calls(f"{what}, {key}", raw[key], reader.bad, reader.is_table))


def read_part(reader: RecordReader, what: str, raw: Any, form: str = "", is_answer: bool = False) -> str:
    """Return the text of one part of a message whose content is a list of parts, as in OpenAI's chat format. For a
    part that is an image or a video, the text is `<image>`, and its name is stored; for other media, it is empty.

    Args:
        what: name of the part in error messages.
        form: where in the record the part is, such as `messages[].content[].`, for the names of unread keys.
    """
    kind = raw.get("type") if isinstance(raw, dict) else None
    if not isinstance(kind, str):
        raise reader.bad(what, raw, "an object with type (text, image or image_url)")
    reader.note_part_weights(what, reader.note_keys(what, raw, PART_KEYS, form, is_answer))
    given = given_images(raw)
    if kind == "text":
        reader.note_unread(raw)
        reader.note_unread({"image": given})
        return reader.text(what, raw.get("text"))
    if kind in IMAGE_PARTS and is_empty(raw.get("text")):
        reader.note_unread(raw, GIVEN_AS)
        if given:
            reader.in_parts.append(reader.image(what, raw))
        return IMAGE_TAG
    named = [raw[key] for key in VIDEO_GIVEN_AS if not is_empty(raw.get(key))]
    if kind == VIDEO and reader.reads_videos and len(named) == 1 and is_empty(raw.get("text")):
        reader.note_unread(raw, VIDEO_GIVEN_AS)
        reader.in_parts.append(reader.video(what, named[0]))
        return IMAGE_TAG
    if kind in IMAGE_PARTS or not names_media(kind):
        raise reader.bad(what, raw, "of type text, image or image_url, and have either text or an image")
    reader.note_unread({kind: raw})
    return ""
