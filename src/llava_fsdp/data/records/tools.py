"""Parse the tools of a record, the calls of its answers, and the results of these calls.

The functions take `bad`, which makes an error: a function (what is wrong, its value, what it must be) -> DataError.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from llava_fsdp.data.records.record import Call, Turn, check_text, is_deep, is_empty, once, shown

TOOL_KEYS = ("tools", "functions", "tool_calls", "function_call")
"""Keys of a record or of one of its turns for tools and calls of tools."""
RECORD_TOOLS = ("tools", "functions")
"""Those of a record, for the tools that its answers may call."""
TURN_CALLS = ("tool_calls", "function_call")
"""Those of an answer, for its calls: a list, or one call."""
RESULTS = frozenset("tool function ipython observation tool_response function_response".split())
"""Names of speakers whose message is the result of a call."""
CALLERS = frozenset(["tool_call", "function_call"])
"""Names of speakers whose message is a call as JSON text, or a list of calls."""
RESULT_KEYS = frozenset(["name", "tool_call_id", "tool_use_id"])
"""Keys of a result that are read, beside its text: the tool, and the id of the call."""
NO_TOOLS = frozenset(["", "[]", "{}", "null"])
"""Texts that stand for no tools, where they are written as JSON in a text."""
GIVEN = ("arguments", "parameters", "input", "args")
"""Keys of a call for its arguments."""
CALL_KEYS = frozenset(["id", "type", "index", "function", "name", "cache_control", *GIVEN])
"""Keys of a call that are read, or change nothing that is learnt."""
NOTHING_TAKEN: dict[str, Any] = {"type": "object", "properties": {}}
"""JSON schema of a tool's arguments if it gives none."""
Bad = Callable[[str, Any, str], Exception]


def has_no_tools(value: Any) -> bool:
    """Return whether the value of a key for tools is empty, or a text with an empty list or object as JSON."""
    return is_empty(value) or (isinstance(value, str) and value.strip() in NO_TOOLS)


def from_json(what: str, value: Any, bad: Bad, needed: str) -> Any:
    """Return a value, parsed if it is a text, which must be JSON. `what` names the value in the error, which `bad`
    makes, and `needed` says there what the value must be. It is raised if the text is not JSON, repeats a key, has a
    number that JSON does not know (such as NaN), or is nested too deeply."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value, object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError):
        raise bad(what, value, needed) from None
    if is_deep(found):
        raise bad(what, value, f"{needed}, nested at most 100 deep")
    return found


def read_tools(raw: dict[str, Any], bad: Bad) -> tuple[dict[str, Any], ...]:
    """Return the tools of a record from its key `tools` or `functions`: a list of JSON schemas, or its JSON text. Each
    is returned as `read_tool` returns it, with the type `function` around it. `bad` makes the error that is raised if
    the record has both keys, or a tool is wrong."""
    given = [key for key in RECORD_TOOLS if not has_no_tools(raw.get(key))]
    if len(given) > 1:
        raise bad(" and ".join(given), [raw[key] for key in given], "one of the two keys")
    needed = "a list of tools, each an object with a name, a description and parameters, or its JSON text"
    found: list[dict[str, Any]] = []
    for key in given:
        value = from_json(key, raw[key], bad, needed)
        for number, tool in enumerate(value if isinstance(value, list) else [value]):
            found.append(read_tool(f"{key}, tool {number}", tool, bad, needed))
    return tuple(found)


def read_tool(what: str, value: Any, bad: Bad, needed: str) -> dict[str, Any]:
    """Return one tool as {"type": "function", "function": {name, description, parameters}}, with the inner keys in the
    record's order. The record may have it in this form, or the inner object alone, or in Anthropic's form
    (`input_schema` instead of `parameters`), as an object or its JSON text. A tool without parameters gets the schema
    of an empty object (NOTHING_TAKEN).

    Args:
        what: name of the tool in error messages.
        bad: makes the error to raise from what is wrong, its value, and what it must be.
        needed: words for what the tool must be, for the error.
    """
    tool = from_json(what, value, bad, needed)
    inner = tool.get("function") if isinstance(tool, dict) and "function" in tool else tool
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise bad(what, value, needed)
    bare = inner is tool  # the type, if there is one, stands beside the name, and is written around the tool instead
    made = {
        "parameters" if key == "input_schema" else key: item
        for key, item in inner.items()
        if not (bare and key == "type")
    }
    if made.get("parameters") is None:
        made["parameters"] = NOTHING_TAKEN
    if not isinstance(made["parameters"], dict):
        raise bad(what, value, "a tool whose parameters are a JSON schema")
    check_text(json.dumps(made, ensure_ascii=False), what)
    return {"type": "function", "function": made}


def read_call(what: str, raw: Any, bad: Bad, is_table: bool = False) -> Call:
    """Return a call from OpenAI's form (`function` with `name` and `arguments`), its inner object alone, or Anthropic's
    (`name` and `input`). Arguments may be JSON text.

    Args:
        what: name of the call in error messages.
        bad: makes an error from what is wrong, its value, and what it must be.
        is_table: whether the record is a row of a table, whose objects have the keys of all rows. So the arguments that
            a call does not have cannot be told from those that are null, and must be JSON text.
    """
    function = (raw.get("function") or raw) if isinstance(raw, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if function is None or not isinstance(name, str) or not name:
        raise bad(what, raw, "a call: an object with a name and arguments")
    given = [function[key] for key in GIVEN if function.get(key) is not None]
    unknown = [key for key, value in (raw | function).items() if key not in CALL_KEYS and not is_empty(value)]
    if unknown or len(given) > 1:
        raise bad(what, raw, f"a call with a name, and arguments under one of {', '.join(GIVEN)}, without other keys")
    found = given[0] if given else {}
    if is_table and isinstance(found, dict) and found:
        raise bad(f"{what}, arguments", found, "JSON text, as columns of objects in Parquet files lose missing keys")
    needed = "an object, or its JSON text"
    values = {} if isinstance(found, str) and not found.strip() else from_json(f"{what}, arguments", found, bad, needed)
    if not isinstance(values, dict):
        raise bad(f"{what}, arguments", found, needed)
    check_text(name + json.dumps(values, ensure_ascii=False), what)
    return Call(name, values, read_id(what, raw.get("id"), bad))


def read_id(what: str, value: Any, bad: Bad) -> str:
    """Return the id of a call as text; an empty text if it is null, because the call then has no id. `bad` makes the
    error that is raised for any other type; `what` names the call in it."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise bad(f"{what}, id", value, "a text or an integer")
    return str(value)


def read_calls(what: str, value: Any, bad: Bad, is_table: bool = False) -> tuple[Call, ...]:
    """Return the calls in a value: a call or a list of calls, or JSON text of these. The value is that of the key
    `tool_calls` or `function_call`, or the text of a message that is a call.

    Args:
        what: name of the value in error messages.
        bad: makes the error to raise from what is wrong, its value, and what it must be.
        is_table: whether the record is a row of a table, where the arguments of a call must be JSON text.
    """
    found = from_json(what, value, bad, "a call or a list of calls, or its JSON text")
    many = found if isinstance(found, list) else [found]
    if not many:
        raise bad(what, value, "a call or a list of calls")
    return tuple(read_call(f"{what}, call {number}", call, bad, is_table) for number, call in enumerate(many))


def joined_calls(turns: Sequence[Turn], bad: Bad, note: Callable[[str], None]) -> list[Turn]:
    """Return the turns without turns whose role is `call`, as ms-swift and ShareGPT write the calls of an answer. The
    calls of such a turn, and its thought, are added to the answer (`gpt`) directly before it. If the turn before is no
    answer, the turn becomes an answer. So neighboring turns of calls become parallel calls of one answer.

    Args:
        bad: makes the error that is raised if an answer and its calls have different thoughts.
        note: gets a message if an answer and its calls have different weights; those of the answer are kept.
    """
    made: list[Turn] = []
    for turn in turns:
        last = made[-1] if made else None
        if turn.role != "call":
            made.append(turn)
        elif last is None or last.role != "gpt":
            made.append(replace(turn, role="gpt"))
        else:
            if (last.learnt, last.weights) != (turn.learnt, turn.weights):
                names = ", ".join(shown(call.name) for call in turn.calls)
                note(f"an answer and its calls ({names}) have different weights; give them one")
            if None not in (last.thought, turn.thought) and last.thought != turn.thought:
                raise bad("an answer", [last.thought, turn.thought], "an answer with one thought")
            thought = turn.thought if last.thought is None else last.thought
            made[-1] = replace(last, calls=(*last.calls, *turn.calls), thought=thought)
    return made


def linked_results(turns: Sequence[Turn], refuse: Callable[[int, str], Exception]) -> list[Turn]:
    """Give each call an id if it has none, and each result the call that it answers: the one with its id, else the
    first of its name, else the next one. Results must follow their calls directly, but those of the last calls may be
    missing. `refuse`: makes the error to raise from the index of a turn and a text."""
    made: list[Turn] = []
    waiting: list[Call] = []
    count = 0
    for number, turn in enumerate(turns):
        if turn.role == "tool":
            (wanted,) = turn.calls or (Call("", {}),)
            matching = [call for call in waiting if wanted.id in ("", call.id) and wanted.name in ("", call.name)]
            if not matching:
                named = f" {wanted.id or wanted.name}" if wanted.id or wanted.name else ""
                raise refuse(number, f"is the result of a call{named} that the answer before it does not make")
            waiting.remove(matching[0])
            turn = replace(turn, calls=(matching[0],))
        elif waiting:
            raise refuse(number, f"follows a call of {waiting[0].name} without its result")
        elif turn.calls:
            calls = []
            for call in turn.calls:
                count += 1
                calls.append(call if call.id else replace(call, id=f"call{count:05d}"))
            if len({call.id for call in calls}) < len(calls):
                raise refuse(number, "has two calls with one id")
            waiting = list(calls)
            turn = replace(turn, calls=tuple(calls))
        made.append(turn)
    return made
