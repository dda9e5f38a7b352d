"""Read the commands of a shell script that starts a training, without running them; words are split with `shlex`.

Quotes, comments, continued lines, `X=v1`, `export X=v1`, `$X` and `${X}` are supported. Control flow, arrays, functions
and here-documents are refused, with file and line in the message. Redirections, `| tee FILE` and `&` at the end of a
line are dropped. Other parts of bash, such as `$(nproc)` or a pipe, are recorded as problems of their line: they matter
only if that line starts the training.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from llava_fsdp.runtime.errors import ConfigError

NAME = r"[A-Za-z_]\w*"
ASSIGNMENT = re.compile(rf"({NAME})(\+?)=(.*)", re.DOTALL)
DECLARE = frozenset("export declare local readonly typeset".split())
KEYWORDS = frozenset("if then else elif fi for while until do done case esac select function { } [ [[ test".split())
PUNCTUATION = frozenset("();<>|&")
COMMENT = r"(?<![^\s;])#[^\n]*"
STRINGS = r"'[^']*'|\"(?:\\.|[^\"\\])*\""
# A command: text up to a newline, `;` or `&&` that is not inside quotes or a comment.
LINE = re.compile(rf"(?:{COMMENT}|{STRINGS}|\\.|[^\n;&\\'\"]|&(?!&))*+", re.DOTALL)
# An escaped character, a variable (its name is group 1 or 2), or an expansion that only bash can evaluate.
DOLLAR = rf"\\.|\$({NAME})|\$\{{({NAME})\}}|\$\{{[^}}]*\}}?|\$\([^)]*\)?|\$[@*#?!0-9]|`[^`]*`?"
IN_STRING = re.compile(DOLLAR, re.DOTALL)
PIECE = re.compile(rf"{DOLLAR}|{STRINGS}|{COMMENT}|(?<![^\s=])~(?=[/\s]|$)", re.DOTALL)
# Redirections, `| tee FILE` and `&` at the end of a command.
OUTPUT = re.compile(
    r"(?:\s+(?:\d?>>?(?:&\d|\s*[\w./${}-]+)|&>>?\s*[\w./${}-]+|\|\s*tee(?:\s+-a)?\s+[\w./${}-]+|&))+\s*$"
)
# Matches the text before a variable if the variable is inside the value of an assignment, where bash does not split the
# variable's value into words.
ASSIGNING = re.compile(rf"\s*(?:(?:{'|'.join(DECLARE)})\s+)?(?:{NAME}\+?=\S*\s+)*{NAME}\+?=\S*", re.DOTALL)


@dataclass(frozen=True)
class ShellCommand:
    """One simple command of a shell script, split into words."""

    words: list[str]
    line: int
    environment: dict[str, str] = field(default_factory=dict)
    """Exported variables, and variables set on the command's line before its name."""
    problems: tuple[str, ...] = ()
    """Messages about parts of the line that only bash could evaluate; if there are any, `words` may be wrong."""


def commands(text: str, given: Mapping[str, str], where: str) -> list[ShellCommand]:
    """Return all simple commands of a shell script, in order, without running any. Values of variables that
    the script assigns are inserted into the lines that follow.

    Args:
        text: the script.
        given: values of variables that the script does not set.
        where: name of the script, for messages.

    Raises:
        ConfigError: a quote is not closed, or the script uses bash syntax that is not supported here.
    """
    text = text.replace("\r\n", "\n")
    variables = {"HOME": str(Path.home()), **given}
    exported: set[str] = set()
    found_commands: list[ShellCommand] = []
    start = 0
    while start < len(text):
        line_match = LINE.match(text, start)
        assert line_match is not None
        number = text.count("\n", 0, start + len(line_match[0]) - len(line_match[0].lstrip())) + 1
        start = line_match.end() + (2 if text.startswith("&&", line_match.end()) else 1)
        if text[line_match.end() : start] not in ("\n", ";", "&&", ""):
            raise ConfigError(f"{where}, line {number}: a quote is not closed; is it a shell script?")
        problems: list[str] = []
        words = split_words(expand_variables(OUTPUT.sub("", line_match[0]), variables, problems))
        operators = list(filter(is_operator, words))
        problems += [f"{sign} around the command" for sign in operators]
        for command in simple_commands(words):
            refuse_bash(command, operators, problems, f"{where}, line {number}")
            declares = command[0] in DECLARE
            if declares:
                exported |= {word.partition("=")[0] for word in command[1:]} if command[0] == "export" else set()
                command = [word for word in command[1:] if not word.startswith("-")]
            assigned: dict[str, str] = {}
            while command and (assignment := ASSIGNMENT.fullmatch(command[0])):
                name, append, value = assignment.groups()
                assigned[name] = (variables | assigned).get(name, "") + value if append else value
                command = command[1:]
            if command and not declares:
                environment = {name: variables[name] for name in variables if name in exported} | assigned
                found_commands.append(ShellCommand(command, number, environment, tuple(problems)))
            elif problems:  # the values are not known
                for name in assigned:
                    variables.pop(name, None)
            else:
                variables |= assigned
    return found_commands


def expand_variables(line: str, variables: Mapping[str, str], problems: list[str]) -> str:
    """Return a line with variables replaced by their values and comments removed; quotes are kept. For a variable
    without a value, or an expansion that only bash can evaluate, `problems` gets a message, and the text stays."""

    def value(found: re.Match[str], quote: Callable[[str], str]) -> str:
        """Return the value of a matched variable, quoted by `quote`; the matched text, if the value is not known."""
        name = found[1] or found[2]
        if name in variables:
            return quote(variables[name])
        cure = f"give {name}=VALUE after the PATHs" if name else "write its value into the script"
        problems.append(f"{found[0]} has no value that can be read without running bash; {cure}")
        return found[0]

    def in_string(found: re.Match[str]) -> str:
        if found[0].startswith("\\"):
            return {"\\\n": "", "\\$": "$", "\\`": "`"}.get(found[0], found[0])
        return value(found, lambda text: re.sub(r'([\\"])', r"\\\1", text))

    def piece(found: re.Match[str]) -> str:
        """Replace one match of PIECE: a string, a variable, an escape, a comment or `~`."""
        first = found[0][0]
        if first == '"':
            return '"' + IN_STRING.sub(in_string, found[0][1:-1]) + '"'
        if first in "$`":
            # bash splits the value of a variable without quotes into words, but not in an assignment
            assigning = ASSIGNING.fullmatch(line[: found.start()])
            return value(found, shlex.quote if assigning else lambda text: shlex.join(text.split()))
        return {"#": "", "~": shlex.quote(str(Path.home()))}.get(first, "" if found[0] == "\\\n" else found[0])

    return PIECE.sub(piece, line)


def split_words(line: str) -> list[str]:
    """Return the words of a line, without quotes. Adjacent operator signs `();<>|&` form a word of their own."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.commenters = ""
    lexer.whitespace_split = True
    return list(lexer)


def is_operator(word: str) -> bool:
    return bool(word) and PUNCTUATION.issuperset(word)


def simple_commands(words: list[str]) -> list[list[str]]:
    return [list(command) for operator, command in groupby(words, is_operator) if not operator]


def refuse_bash(command: list[str], operators: list[str], problems: list[str], where: str) -> None:
    """Raise ConfigError if a command uses loops, functions, arrays or other syntax of bash that changes the meaning of
    other lines; or if it begins with a flag, which then belongs to the line before.

    Args:
        operators: all operators (such as `|` or `(`) of the command's line.
        problems: messages about the line: one for each operator, and one for each part that only bash could evaluate.
            An array, such as `X=(a b)`, has none of the latter.
    """
    needs = ""
    if command[0] in KEYWORDS:
        needs = f"`{command[0]}`"
    elif any(sign.startswith("<<") for sign in operators):
        needs = "a here-document"
    elif any(sign.startswith("()") for sign in operators):
        needs = "a function"
    elif (
        any(re.fullmatch(rf"{NAME}\+?=", word) for word in command)
        and "(" in operators
        and len(problems) == len(operators)
    ):
        needs = "an array"
    if needs:
        raise ConfigError(f"{where}: {needs} needs bash, which is not run here; give the plain training command")
    if command[0].startswith("--"):
        raise ConfigError(f"{where}: {command[0]} stands alone; is a \\ missing at the end of the line before?")
