"""The commands of a shell script, without running it: enough of bash's grammar for training scripts.

Quotes, comments, continued lines, assignments (`X=v1`, `export X=v1`, arrays), `$X`, `${X}`, `${X:-default}`, lists of
commands and here-documents are understood. What only a shell could know (`$1`, `$(nproc)`, an unset variable) stays in
the words as a mark between OPEN and CLOSE, which `shown` and `quoted` turn back into what the script said; what a
branch or another file may change is noted. A file of more than 300 lines because one reader follows one text;
`tests/migrate/test_migrate.py` has bash itself as the judge.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from llava_fsdp.runtime.errors import ConfigError

# An unresolved expansion inside a word stands between these two characters of Unicode's private use area.
OPEN, CLOSE = "\ue000", "\ue001"
MARK = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")
NAME = r"[A-Za-z_]\w*"
ASSIGNMENT = re.compile(rf"({NAME})(\+?)=(.*)", re.DOTALL)
BRANCHES = frozenset("if case for while until".split())
ENDS = frozenset("fi esac done".split())
KEYWORDS = BRANCHES | ENDS | frozenset("then elif else do { } ! time".split())
DECLARE = frozenset("export declare local readonly typeset".split())
SIMPLE = re.compile(rf"\$({NAME}|[0-9@*#?$!-])")
OPERATOR = re.compile(r"&&|\|\||[\n;&|()]")
REDIRECT = re.compile(r"(?:\d*|&)(?:>>?|<<<?|<)\s*(?:&\d+)?(?:&?[-\w./$\"'{}*~:]+)?")
ARRAY = re.compile(rf"({NAME})(\+?)=\(")
HERE_DOCUMENT = re.compile(r"<<(-?)\s*([\"']?)([\w.+-]+)\2")


@dataclass(frozen=True)
class Command:
    """One simple command: its words, and the variables that it sees."""

    words: list[str]
    variables: dict[str, str]
    line: int
    environment: dict[str, str] = field(default_factory=dict)
    """What it gets besides: variables exported or set before its name, which the script itself does not read."""


@dataclass
class Word:
    """A word that is being read; `parts` are its fields, more than one where an unquoted variable had blanks."""

    text: str = ""
    started: bool = False
    done: list[str] = field(default_factory=list)
    plain: bool = True
    """No part of it was quoted or expanded: it may be a keyword or an operator."""

    def add(self, text: str) -> None:
        self.text += text
        self.started = True

    def split_in(self, text: str) -> None:
        """An unquoted expansion: blanks in it end a field, as in the shell; what is not known stays whole."""
        pieces = [text] if is_open(text) else re.split(r"\s+", text)
        for index, piece in enumerate(pieces):
            if index:
                self.end_field()
            if piece:
                self.add(piece)

    def end_field(self) -> None:
        if self.started:
            self.done.append(self.text)
        self.text, self.started = "", False


def open_mark(text: str) -> str:
    return f"{OPEN}{text}{CLOSE}"


def is_open(text: object) -> bool:
    return isinstance(text, str) and OPEN in text


def open_names(text: object) -> list[str]:
    """What a word leaves to the shell: `$MODEL_VERSION`, `$(nproc)`."""
    return MARK.findall(text) if isinstance(text, str) else []


def shown(text: object) -> str:
    return MARK.sub(r"\1", str(text))


def quoted(text: str) -> str:
    """A word as the shell takes it; what is left to the shell stays so, inside double quotes."""
    if not is_open(text):
        if re.fullmatch(r"[\w@%+=:,./-]+", text, re.ASCII):
            return text
        return "'" + text.replace("'", "'\"'\"'") + "'"
    pieces = re.split(f"({OPEN}[^{CLOSE}]*{CLOSE})", text)
    escaped = [shown(p) if p.startswith(OPEN) else re.sub(r'([\\"$`])', r"\\\1", p) for p in pieces]
    return '"' + "".join(escaped) + '"'


def commands(text: str, given: Mapping[str, str], where: str) -> tuple[list[Command], list[str]]:
    """Every simple command of a script, in order, and what cannot be known of them without running it.

    Args:
        given: values of variables that the script leaves to its caller; what it sets itself wins.

    Raises:
        ConfigError: a quote or an expansion is not closed.
    """
    return Reader(text.replace("\r\n", "\n"), given, where).read()


class Reader:
    """One pass over the text, with the variables as they are at that place."""

    def __init__(self, text: str, given: Mapping[str, str], where: str) -> None:
        self.text = text
        self.where = where
        self.at = 0
        self.variables = dict(given)
        self.arrays: dict[str, list[str]] = {}
        self.found: list[Command] = []
        self.words: list[tuple[str, bool]] = []
        self.start = 0
        self.ends: list[tuple[str, bool]] = []
        """The here-documents that begin at the next line: their last line, and whether tabs may stand before it."""
        self.depth = 0
        self.exported: set[str] = set()
        self.notes: list[str] = []

    def read(self) -> tuple[list[Command], list[str]]:
        while self.at < len(self.text):
            self.step()
        self.end_command()
        return self.found, self.notes

    def step(self) -> None:
        """A blank, a comment, the end of a command, or a word."""
        sign = self.text[self.at]
        if self.text.startswith("\\\n", self.at):
            self.at += 2
        elif sign in " \t":
            self.at += 1
        elif sign == "#":
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end
        elif here := HERE_DOCUMENT.match(self.text, self.at):
            self.ends.append((here[3], bool(here[1])))
            self.at = here.end()
        elif redirect := REDIRECT.match(self.text, self.at):
            self.at = redirect.end()
        elif operator := OPERATOR.match(self.text, self.at):
            self.end_command()
            self.at = operator.end()
            if operator[0] == "\n":
                self.skip_documents()
        else:
            self.read_word()

    def skip_documents(self) -> None:
        for name, tabs in self.ends:
            end = re.compile(rf"^{chr(9) + '*' if tabs else ''}{re.escape(name)}$", re.MULTILINE)
            found = end.search(self.text, self.at)
            if found is None:
                raise self.mistake(self.at, f"the here-document has no end {name}")
            self.at = found.end()
        self.ends = []

    def read_word(self) -> None:
        if not self.words:
            self.start = self.at
        if array := ARRAY.match(self.text, self.at):
            if not self.words or self.words[0][0] in DECLARE:
                values = self.read_array(array.end())
                self.arrays[array[1]] = (self.arrays.get(array[1], []) if array[2] else []) + values
                self.note_branch(array[1])
                return
        word = self.word()
        word.end_field()
        is_assignment = ASSIGNMENT.fullmatch(word.done[0]) if word.done else None
        if is_assignment and (not self.words or self.words[0][0] in DECLARE):
            word.done = [" ".join(word.done)]
        self.words += [(text, word.plain) for text in word.done]

    def read_array(self, begin: int) -> list[str]:
        inner = Reader(self.text, self.variables, self.where)
        inner.arrays, inner.at = self.arrays, begin
        values: list[str] = []
        while inner.at < len(self.text) and self.text[inner.at] != ")":
            if self.text[inner.at] in " \t\n":
                inner.at += 1
            elif self.text[inner.at] == "#":
                inner.at = (self.text.find("\n", inner.at) + 1) or len(self.text)
            elif self.text.startswith("\\\n", inner.at):
                inner.at += 2
            else:
                word = inner.word()
                word.end_field()
                values += word.done
        self.at = inner.at + 1
        return values

    def word(self) -> Word:
        """The word at this place; quotes are gone, variables have their values."""
        word = Word()
        while self.at < len(self.text):
            sign = self.text[self.at]
            if sign in " \t\n;&|()<>":
                break
            if sign == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                if following != "\n":
                    word.add(following)
                self.at += 2
            elif sign == "'" or self.text.startswith("$'", self.at):
                begin = self.at + (1 if sign == "'" else 2)
                word.add(self.text[begin : self.closing("'", begin)])
                word.plain = False
                self.at = self.closing("'", begin) + 1
            elif sign == '"':
                self.double_quoted(word)
            elif sign == "~" and self.text[self.at + 1 : self.at + 2] in ("/", "", " ", "\n") and self.at_home(word):
                word.add(self.variables.get("HOME", open_mark("$HOME")))
                self.at += 1
            elif sign in "$`":
                word.plain = False
                value = self.expansion()
                if isinstance(value, list):
                    self.add_fields(word, value)
                else:
                    word.split_in(value)
            else:
                word.add(sign)
                self.at += 1
        return word

    def at_home(self, word: Word) -> bool:
        """Where bash takes ~ for the home folder: at the beginning of a word or of a variable's value."""
        return not word.started or (not self.words and bool(re.fullmatch(f"{NAME}=", word.text)))

    def double_quoted(self, word: Word) -> None:
        begin = self.at
        word.add("")
        word.plain = False
        self.at += 1
        while self.text[self.at : self.at + 1] != '"':
            sign = self.text[self.at : self.at + 1]
            if not sign:
                raise self.mistake(begin, 'a " is not closed')
            if sign == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                if following != "\n":
                    word.add(following if following in '"\\$`' else sign + following)
                self.at += 2
            elif sign in "$`":
                value = self.expansion()
                if isinstance(value, list):
                    self.add_fields(word, value)
                else:
                    word.add(value)
            else:
                word.add(sign)
                self.at += 1
        self.at += 1

    def add_fields(self, word: Word, values: list[str]) -> None:
        for index, value in enumerate(values):
            if index:
                word.end_field()
            word.add(value)

    def expansion(self) -> str | list[str]:
        """The value of what begins here with `$` or a backtick; a list for all of an array."""
        begin, two = self.at, self.text[self.at : self.at + 2]
        if two.startswith("`"):
            self.at = self.closing("`", begin + 1) + 1
            return open_mark(self.text[begin : self.at])
        if two == "$(":
            self.at = self.balanced(begin + 1)
            return self.arithmetic(self.text[begin : self.at])
        if two == "${":
            self.at = self.closing("}", begin + 2) + 1
            return self.braced(self.text[begin + 2 : self.at - 1])
        if simple := SIMPLE.match(self.text, self.at):
            self.at = simple.end()
            return self.variables.get(simple[1], open_mark(simple[0]))
        self.at += 1
        return "$"

    def arithmetic(self, text: str) -> str:
        """`$((2 * GPUS))` where all of it is known, else as it stands."""
        inner = re.fullmatch(r"\$\(\((.*)\)\)", text, re.DOTALL)
        if inner is None:
            return open_mark(text)
        known = re.sub(rf"\$?\{{?({NAME})\}}?", lambda m: self.variables.get(m[1], m[0]), inner[1])
        numbers = re.fullmatch(r"\s*(\d+)\s*([*+/-])\s*(\d+)\s*", known)
        if numbers is None:
            return known.strip() if known.strip().isdigit() else open_mark(text)
        a, b = int(numbers[1]), int(numbers[3])
        if numbers[2] == "/" and b == 0:
            return open_mark(text)
        return str({"*": a * b, "+": a + b, "-": a - b, "/": a // b if b else 0}[numbers[2]])

    def braced(self, inside: str) -> str | list[str]:
        whole = open_mark("${" + inside + "}")
        if array := re.fullmatch(rf"({NAME})\[[@*]\]", inside):
            return self.arrays.get(array[1], whole)
        parts = re.fullmatch(rf"({NAME}|[0-9@*#])(?:(:?[-=?+])(.*))?", inside, re.DOTALL)
        if parts is None:
            return whole  # ${X%suffix} and the like
        name, operator, default = parts[1], parts[2], parts[3]
        value = self.variables.get(name)
        if operator is None or operator[-1] == "?":
            return whole if value is None else value
        if operator[-1] == "+":
            return self.inner(default) if value else ""
        if value is None or (operator[0] == ":" and not value):
            value = self.inner(default)
            if operator[-1] == "=":
                self.variables[name] = value
        return value

    def inner(self, text: str) -> str:
        """A default inside braces, itself expanded."""
        reader = Reader(f'"{text}"' if not text.startswith(("'", '"')) else text, self.variables, self.where)
        word = reader.word()
        word.end_field()
        return " ".join(word.done)

    def closing(self, sign: str, begin: int) -> int:
        end, depth = begin, 0
        while end < len(self.text):
            if sign == "}" and self.text.startswith("${", end):
                depth += 1
            elif self.text[end] == sign:
                if not depth:
                    return end
                depth -= 1
            end += 1
        raise self.mistake(begin, f"a {sign} is missing")

    def balanced(self, begin: int) -> int:
        depth = 0
        for end in range(begin, len(self.text)):
            depth += {"(": 1, ")": -1}.get(self.text[end], 0)
            if depth == 0:
                return end + 1
        raise self.mistake(begin, "a ) is missing")

    def mistake(self, place: int, what: str) -> ConfigError:
        line = self.text.count("\n", 0, place) + 1
        return ConfigError(f"{self.where}, line {line}: {what}; is it a shell script?")

    def note_branch(self, name: str) -> None:
        if self.depth:
            line = self.text.count("\n", 0, self.start) + 1
            self.notes.append(f"line {line} sets {name} inside if, case, for or while: taken as if it ran")

    def end_command(self) -> None:
        """What the words were: assignments, which last, or a command."""
        words, self.words = self.words, []
        line = self.text.count("\n", 0, self.start) + 1
        while words and words[0][1] and words[0][0] in KEYWORDS:
            self.depth += (words[0][0] in BRANCHES) - (words[0][0] in ENDS)
            words = words[1:]
        declares = words[0][0] if words and words[0][0] in DECLARE else ""
        if declares:
            words = [word for word in words[1:] if not word[0].startswith("-")]
        own: dict[str, str] = {}
        while words and (assignment := ASSIGNMENT.fullmatch(words[0][0])):
            name, append, value = assignment.groups()
            own[name] = (self.variables | own).get(name, "") + value if append else value
            words = words[1:]
        if not words or declares:
            self.variables |= own
            if declares == "export":
                self.exported |= own.keys() | {text for text, _ in words}
            for name in own:
                self.note_branch(name)
        else:
            texts = [text for text, _ in words]
            said = shown(" ".join(texts))
            if texts[0] in ("source", "."):
                self.notes.append(f"line {line}: {said} is not read; give what it sets as NAME=VALUE")
            if texts[0] == "cd":
                self.notes.append(f"line {line}: {said}: start the command from there")
            if texts[0].startswith("--"):
                self.notes.append(f"line {line}: {said} stands alone; is a \\ missing at the end of the line before?")
            seen = self.variables | own
            kept = {name for name in self.exported | own.keys() if not re.search(rf"\$\{{?{name}\b", self.text)}
            environment = {name: seen[name] for name in seen if name in kept}
            self.found.append(Command(texts, seen, line, environment))
