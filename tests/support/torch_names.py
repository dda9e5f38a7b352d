"""The names of torch that a Python file uses, read from its source."""

import ast
from pathlib import Path


def names_of_torch(path: Path) -> set[str]:
    """Return names such as `torch.nn.Linear`, and `torch.nn.Linear(bias=)` for a keyword that a call of it gets.

    Methods of objects are not among them: the source does not tell an object's class.
    """
    nodes = list(ast.walk(ast.parse(path.read_text())))
    known, found = imports_of(nodes)

    def dotted(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        base = dotted(node.value) if isinstance(node, ast.Attribute) else None
        return f"{base}.{node.attr}" if base is not None and isinstance(node, ast.Attribute) else None

    for node in nodes:
        if isinstance(node, ast.Attribute) and (name := dotted(node)) is not None:
            found.add(name)
        elif isinstance(node, ast.Call) and (name := dotted(node.func)) is not None:
            found |= {f"{name}({keyword.arg}=)" for keyword in node.keywords if keyword.arg is not None}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr"):
            base, attribute = dotted(node.args[0]), node.args[1]
            if base is not None and isinstance(attribute, ast.Constant):
                found.add(f"{base}.{attribute.value}")
    return found


def imports_of(nodes: list[ast.AST]) -> tuple[dict[str, str], set[str]]:
    """Return what the names of a file that come from torch stand for, and all that the file imports from torch."""
    known: dict[str, str] = {}
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] == "torch":
                    known[one.asname or "torch"] = one.name if one.asname else "torch"
                    found.add(one.name)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            for one in node.names:
                known[one.asname or one.name] = f"{node.module}.{one.name}"
                found.add(f"{node.module}.{one.name}")
    return known, found
