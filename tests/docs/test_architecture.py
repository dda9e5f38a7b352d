"""docs/architecture.md names the packages in the order of their layers, and functions that exist."""

import ast
import re
import tomllib

from documents import DOCS, ROOT

PAGE = (DOCS / "architecture.md").read_text()
PACKAGE = ROOT / "src" / "llava_fsdp"


def test_the_table_has_every_package_in_the_order_of_the_layers() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    (contract,) = [
        c for c in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
        if c["id"] == "layers"
    ]  # fmt: skip
    layer = {name: n for n, line in enumerate(contract["layers"]) for name in line.split(" | ")}
    assert [layer[name] for name in named] == sorted(layer.values())
    there = {p.stem for p in PACKAGE.iterdir() if (p.is_dir() and list(p.glob("*.py"))) or p.suffix == ".py"}
    assert set(named) == there - {"__init__"}


def test_functions_and_files_that_are_named_exist() -> None:
    for path in re.findall(r"`([a-z_0-9/]+\.py)`", PAGE):
        assert (PACKAGE / path).is_file(), path
    named = re.findall(r"`([\w.]+)` in `([a-z_0-9/]+\.py)`", PAGE)
    assert len(named) > 20
    for name, path in named:
        found: list[ast.stmt] = ast.parse((PACKAGE / path).read_text()).body
        for part in name.split("."):
            definitions = {d.name: d for d in found if isinstance(d, ast.FunctionDef | ast.ClassDef)}
            assert part in definitions, f"{path} has no {name}"
            found = definitions[part].body


def test_the_page_fits_two_screens() -> None:
    assert len(PAGE.splitlines()) <= 100
