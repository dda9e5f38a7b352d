"""Render chat templates of unknown origin with transformers, in a process with limits on processor time and memory.

A template of a few bytes can take any time and memory, by a power, a width, doubled texts, or lists that hold each
other; Jinja's sandbox does not prevent that, and Python cannot interrupt it.
"""

import contextlib
import time
from functools import lru_cache
from typing import Any

from llava_fsdp.runtime.process.limited_process import Answer, LimitBroken, LimitedProcess, MiB, Work

SECONDS = 1
"""Processor time that the rendering of a conversation may take."""
MEMORY = 256
"""MiB of memory that the rendering of a conversation may take."""
EXPANSION = 8
"""A rendered text may have 1 MiB, and in addition so many times the characters of the conversation."""
BREAKS = "breaks a limit: it"
"""Beginning of the message about a template that takes too much time or memory, or writes too long a text."""


class TemplateRefused(Exception):
    """A template fails, or breaks a limit; the message says why."""


@lru_cache(1)
def process() -> LimitedProcess:
    """The process that renders templates for the current one. It starts when it is first used."""
    return LimitedProcess(make_work, SECONDS, MEMORY)


def render(code: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> tuple[str, float]:
    """Render a conversation, in transformers' form, as its `apply_chat_template` does, but in a process with limited
    memory and time. Return the text, and the seconds of processor time that this took, without compiling the template.
    Raise TemplateRefused if the template fails or breaks a limit. `variables`: the template's, such as `bos_token`."""
    try:
        answer, text = process()({"code": code, "messages": messages, "variables": variables})
    except LimitBroken as error:
        raise TemplateRefused(f"{BREAKS} {error}") from error
    if "error" in answer:
        raise TemplateRefused(answer["error"])
    return text.decode("utf-8", "surrogatepass"), float(answer["seconds"])


def make_work() -> Work:
    """Return the function that answers requests in the limited process. It renders a conversation with a template, and
    returns the seconds that this took and the text, or an error."""
    from transformers.utils.chat_template_utils import render_jinja_template

    last = ""

    def work(request: dict[str, Any]) -> Answer:
        """Render a conversation. Compiling a new template does not count as time of the conversation."""
        nonlocal last
        code, messages, variables = request["code"], request["messages"], request["variables"]
        if code != last:
            last = code
            with contextlib.suppress(Exception):  # compiles it; the error of an empty conversation does not matter
                render_jinja_template([[]], chat_template=code)
        began = time.process_time()
        try:
            text = render_jinja_template([messages], chat_template=code, **variables)[0][0]
        except MemoryError:  # the process reports that the limit of memory is reached
            raise
        except Exception as error:
            why = " ".join(str(error)[:1000].split())[:200]
            return {"error": f"fails: {type(error).__name__}: {why}"}, b""
        seconds, most = time.process_time() - began, MiB + EXPANSION * size_of(messages)
        if len(text) > most:
            return {"error": f"{BREAKS} writes {len(text)} characters, more than the {most} that it may"}, b""
        return {"seconds": seconds}, text.encode("utf-8", "surrogatepass")

    return work


def size_of(messages: list[dict[str, Any]]) -> int:
    """Return the number of characters of the texts, in any form in which transformers takes them."""
    return sum(len(value) if isinstance(value, str) else len(str(value)) for own in messages for value in own.values())
