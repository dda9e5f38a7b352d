"""How large is the code, how much does the training loop pull in, and does a commit that moves files change only paths?

    python benchmarks/size.py [--commit REV] [--json]       # lines, files, imports; of the working tree or of a commit
    python benchmarks/size.py --docstrings 40 --seed 1      # docstrings drawn at random, to be read alone
    python benchmarks/size.py --moved REV                   # what REV changes besides paths and imports; exit code 1

Lines of code are lines that hold something other than blanks, comments and docstrings.
"""

import argparse
import ast
import io
import json
import random
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path

from provenance import REPOSITORY

PACKAGE = "llava_fsdp"
LOOP = ("train/loop.py", "loop.py")
"""The training loop, by its path in the package; the second was its place in a flat layout."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="of this commit instead of the working tree")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--docstrings", type=int, metavar="N", help="print N docstrings drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--moved", metavar="REV", help="compare a commit that moves files with its parent")
    options = parser.parse_args()
    if options.moved:
        sys.exit(report_moved(options.moved))
    with tempfile.TemporaryDirectory() as folder:
        tree = REPOSITORY
        if options.commit:
            tree = Path(folder)
            archive = subprocess.run(["git", "-C", str(REPOSITORY), "archive", options.commit], check=True, stdout=-1)
            subprocess.run(["tar", "-x", "-C", folder], check=True, input=archive.stdout)
        if options.docstrings:
            drawn = random.Random(options.seed).sample(sorted(docstrings(tree)), options.docstrings)
            print("\n\n".join(f"{number}. {text}" for number, (_, text) in enumerate(drawn, 1)))
            return
        found = figures(tree)
    print(json.dumps(found, indent=1) if options.json else "\n".join(f"{k:48} {v:>8,}" for k, v in found.items()))


def figures(tree: Path) -> dict[str, int]:
    """Every figure by its name."""
    found = {}
    for folder in ("src", "tests", "benchmarks"):
        texts = [path.read_text() for path in sorted((tree / folder).rglob("*.py"))]
        found[f"{folder}: files"] = len(texts)
        found[f"{folder}: lines"] = sum(text.count("\n") for text in texts)
        found[f"{folder}: lines of code"] = sum(map(lines_of_code, texts))
    package = tree / "src" / PACKAGE
    loop = closure(package)
    found["files that the training loop imports"] = len(loop)
    found["their lines"] = sum(path.read_text().count("\n") for path in loop)
    found["files at the top of the package"] = len(list(package.glob("*.py")))
    makers = [path for path in package.rglob("*.py") if re.search(r"[\"']<svg\b", path.read_text())]
    found["files that make SVG"] = len(makers)
    return found


def lines_of_code(text: str) -> int:
    """Lines without blanks, comments and docstrings; the string behind an assignment, which documents it, is one."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    held: set[int] = set()
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in nothing:
            held |= set(range(token.start[0], token.end[0] + 1))
    return len(held - documented)


def closure(package: Path) -> set[Path]:
    """Files of the package that the training loop imports, inside functions too; imports for types alone do not run."""
    waiting, seen = [next(package / name for name in LOOP if (package / name).is_file())], set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in imports_of(ast.parse(path.read_text())):
            waiting += [file for file in files_of(name, package) if file.is_file()]
    return seen


def imports_of(tree: ast.AST) -> Iterator[str]:
    types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in types:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == PACKAGE)


def files_of(name: str, package: Path) -> list[Path]:
    """The files that importing this dotted name runs: a module's and its packages', without empty ones."""
    parts = name.split(".")[1:]
    files = [package.joinpath(*parts[:n], "__init__.py") for n in range(len(parts) + 1)]
    files += [package.joinpath(*parts[:n]).with_suffix(".py") for n in range(1, len(parts) + 1)]
    return [file for file in files if file.is_file() and file.stat().st_size]


def docstrings(tree: Path) -> Iterator[tuple[str, str]]:
    """(where, what it documents and its text) of everything in the package that has a docstring."""
    for path in sorted((tree / "src" / PACKAGE).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                name = path.name if isinstance(node, ast.Module) else node.name
                given = f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else ""
                yield f"{path.relative_to(tree)}:{getattr(node, 'lineno', 1)}", f"{name}{given}\n{text}"


def report_moved(rev: str) -> int:
    """Print what a commit changes in Python files besides paths, imports and layout; 1 if there is anything."""
    git = ["git", "-C", str(REPOSITORY)]
    status = subprocess.run([*git, "diff", "-M30%", "--name-status", f"{rev}~1", rev], check=True, stdout=-1, text=True)
    pairs, added = {}, []
    for kind, *paths in (line.split("\t") for line in status.stdout.splitlines()):
        if paths[-1].endswith(".py"):
            (added.append(paths[0]) if kind in "AD" else pairs.update({paths[0]: paths[-1]}))
    modules = {dotted(old): dotted(new) for old, new in pairs.items()}
    changed = 0
    for old, new in pairs.items():
        texts = [subprocess.run([*git, "show", r], check=True, stdout=-1, text=True).stdout
                 for r in (f"{rev}~1:{old}", f"{rev}:{new}")]  # fmt: skip
        before, after = normal(texts[0], modules), normal(texts[1], {})
        different = sum(a != b for a, b in zip(before, after, strict=False)) + abs(len(before) - len(after))
        if different:
            changed += 1
            print(f"{new}: {different} of {len(after)} top-level statements differ")
    print(f"{len(pairs)} files moved or with other imports, {changed} with other statements; new or gone: {added}")
    return int(changed > 0)


def dotted(path: str) -> str:
    """The name by which a file is imported: tests and benchmarks import each other by their last name."""
    parts = path.removeprefix("src/").removesuffix(".py").split("/")
    if parts[0] != PACKAGE:
        return parts[-1]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def normal(text: str, modules: dict[str, str]) -> list[str]:
    """Top-level statements without imports, every imported name replaced by what it stands for after the move."""
    tree, targets = ast.parse(text), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                parent = modules.get(node.module or "", node.module)
                targets[alias.asname or alias.name] = modules.get(whole, f"{parent}.{alias.name}")

    class Rename(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return ast.Name(targets.get(node.id, node.id), node.ctx)

        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            value = node.value
            if isinstance(value, str):  # texts may name a module or a path, and wrap elsewhere
                value = "".join(re.sub(r"[\w/.]*(?:llava_fsdp|/)[\w/.]*|\s", "", value).split())
            return ast.Constant(value)

        def visit_Import(self, node: ast.AST) -> None:
            return None

        visit_ImportFrom = visit_Import  # noqa: N815

        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            return self.here(node)

        def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
            return self.here(node)

        def here(self, node: ast.AST) -> ast.AST:
            """A folder above this file is a path: how far above depends on where the file is."""
            is_path = re.fullmatch(r"Path\(__file__\)(\.resolve\(\))?\.parents?(\[\d\])?", ast.unparse(node))
            return ast.Name("here", ast.Load()) if is_path else self.generic_visit(node)

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if "__name__" in ast.unparse(node.test) else self.generic_visit(node)

    return [ast.dump(statement) for statement in Rename().visit(tree).body]


if __name__ == "__main__":
    main()
