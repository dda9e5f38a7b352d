"""What MkDocs needs to know of the repository around docs/: the stored results of benchmarks/ and examples/ and the
programs examples/train_* are part of the site, and README's table.

Links in a page are those that hold in the repository (`../benchmarks/results/x.json`); the site has the same files
below `benchmarks/` and `examples/`, and `benchmarks/README.md` as the page `benchmarks.md`.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
# A page of the site that lies elsewhere in the repository: its links are relative to that place.
MOVED = {"benchmarks.md": BENCHMARKS / "README.md"}
README_BLOCK = re.compile(r"<!-- README: (\w+) -->.*?<!-- /README -->", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the stored results and their images, the programs, and the pages that lie elsewhere."""
    examples = ROOT / "examples"
    results = [path for folder in (BENCHMARKS, examples) for path in sorted((folder / "results").iterdir())]
    for path in [*results, *sorted(examples.glob("train_*"))]:
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for name, path in MOVED.items():
        files.append(File.generated(config, name, content=path.read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links into the repository as links of the site."""
    if page.file.src_uri in MOVED:
        return re.sub(r"\]\(results/", "](benchmarks/results/", markdown)
    markdown = README_BLOCK.sub(lambda found: from_readme(found[1]), markdown)
    markdown = markdown.replace("](../benchmarks/README.md", "](benchmarks.md")
    return re.sub(r"\]\(\.\./(benchmarks/results/|examples/results/|examples/train_)", r"](\1", markdown)


def from_readme(name: str) -> str:
    """What stands between two markers of README.md, which a script keeps there."""
    text = (ROOT / "README.md").read_text()
    return text.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0].replace("](benchmarks/", "](../benchmarks/")
