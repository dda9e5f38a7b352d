"""Measure the structure of the source code: `python launch/structure.py [COMMIT...]`.

Prints one column for the working tree and one for each commit that is named. The rows are counts of lines, of calls and
definitions that make code hard to follow, and of imports in a circle.
"""

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 6
"""Number of parameters above which a function is counted."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def parsed(folder: Path) -> dict[Path, ast.Module]:
    """Return the syntax tree of each Python file under a folder, by its path."""
    return {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that hold strings which are statements: docstrings, also those of fields."""
    strings = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def line_counts(path: Path, tree: ast.Module) -> Counter[str]:
    """Count a file's lines of code (neither blank, comment nor docstring) and of docstrings."""
    text = path.read_text()
    words = docstring_lines(tree)
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            code |= set(range(token.start[0], token.end[0] + 1))
    return Counter(code=len(code - words), docstrings=len(words))


def num_parameters(function: Function) -> int:
    """Return the number of a function's parameters, without `self` and `cls`."""
    args = function.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    return len([arg for arg in named if arg.arg not in ("self", "cls")])


def fields_of(node: ast.ClassDef) -> list[str]:
    return [s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]


def fixed_names(trees: dict[Path, ast.Module]) -> set[str]:
    """Return the names of functions and classes of the project that take a fixed number of positional arguments."""
    fixed: set[str] = set()
    open_ended: set[str] = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                (open_ended if node.args.vararg else fixed).add(node.name)
            elif isinstance(node, ast.ClassDef):
                own = next((n for n in node.body if isinstance(n, Function) and n.name == "__init__"), None)
                (open_ended if own is not None and own.args.vararg else fixed).add(node.name)
    return fixed - open_ended


def splats(tree: ast.Module, fixed: set[str]) -> int:
    """Count calls that spread a tuple without a name over several parameters: `f(*settings)`, if f has fixed ones."""
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(isinstance(arg, ast.Starred) for arg in node.args):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            count += name in fixed
    return count


def module_name(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """Yield the modules of the project that a file imports, in functions and for types, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module for name in inner if node.module in modules)


def num_in_cycles(graph: dict[str, set[str]]) -> int:
    """Return how many modules import themselves through others."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for other in graph.get(todo.pop(), set()) - seen:
                seen.add(other)
                todo.append(other)
        return seen

    return sum(name in reachable(name) for name in graph)


def measure(root: Path) -> dict[str, object]:
    """Return the figures of a tree of the project, by the words that describe them."""
    source = root / "src"
    trees = parsed(source / "llava_fsdp")
    lines = sum((line_counts(path, tree) for path, tree in trees.items()), Counter())
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, Function)]
    classes = Counter(node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    flat = Counter(path.parent for path in trees if path.name != "__init__.py")
    names = {module_name(path, source): tree for path, tree in trees.items()}
    graph = {name: set(imports(tree, set(names))) - {name} for name, tree in names.items()}
    fixed = fixed_names(trees)
    benchmarks = sum((line_counts(p, t) for p, t in parsed(root / "benchmarks").items()), Counter())
    bugs = (root / "tests/mutants/bugs.toml").read_text()
    pages = [*sorted((root / "docs").glob("*.md")), root / "README.md"]
    words = {page.name: len(page.read_text().split()) for page in pages}
    largest, count = flat.most_common(1)[0]
    return {
        "files": len(trees),
        "lines of code": lines["code"],
        "lines of docstrings": lines["docstrings"],
        "lines of code in benchmarks": benchmarks["code"],
        "planted bugs": bugs.count("[[bug]]") or bugs.count("[["),
        "calls that spread an unnamed tuple": sum(splats(tree, fixed) for tree in trees.values()),
        f"functions of more than {LARGEST} parameters": sum(num_parameters(f) > LARGEST for f in functions),
        "class names that occur twice": sum(number > 1 for number in classes.values()),
        "most files in one folder": f"{count} ({largest.name})",
        "modules in import cycles": num_in_cycles(graph),
        "words of documents": sum(words.values()),
        "words of docs/decisions.md": words["decisions.md"],
    }


def measure_commit(commit: str) -> dict[str, object]:
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], check=True, capture_output=True).stdout
    with TemporaryDirectory() as folder:
        tarfile.open(fileobj=io.BytesIO(archive)).extractall(folder, filter="data")
        return measure(Path(folder))


def main(commits: list[str]) -> None:
    columns = {commit: measure_commit(commit) for commit in commits} | {"now": measure(ROOT)}
    print(f"{'':45}", *(f"{name[:16]:>18}" for name in columns))
    for row in columns["now"]:
        values = [next((v for k, v in c.items() if k.split("(")[0] == row), "") for c in columns.values()]
        print(f"{row:45}", *(f"{value!s:>18}" for value in values))


if __name__ == "__main__":
    main(sys.argv[1:])
