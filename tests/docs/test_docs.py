"""README.md, docs/ and pages for contributors: links, keys, commands and messages that exist, tables that are current,
a site that builds."""

import ast
import importlib
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from commands import command
from documents import DOCS, PAGES, ROOT, SOURCES, Block, blocks_of, composed, entries, entry_of
from PIL import Image

import llava_fsdp.config as schemas
from llava_fsdp import __version__
from llava_fsdp.config import schema_keys
from llava_fsdp.migrate.command import lines, migrate
from llava_fsdp.migrate.main import parse
from llava_fsdp.migrate.reading.inputs import read_runs

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHELL = [block for block in BLOCKS if block.is_shell]
SETTINGS = ROOT / "mkdocs.yml"


def writer(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of docs/, which finds its neighbours as it does when it is run."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module(name)


def nav_pages(entry: object) -> Iterator[str]:
    for value in entry if isinstance(entry, list) else entry.values() if isinstance(entry, dict) else [entry]:
        if isinstance(value, str):
            yield value
        else:
            yield from nav_pages(value)


def settings() -> dict:
    """mkdocs.yml without the tags that only MkDocs knows."""
    return yaml.safe_load(re.sub(r"!!python/\S+", "", SETTINGS.read_text()))


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `mkdocs build --strict`, where a warning is an error: a link or an anchor to nowhere."""
    mkdocs = pytest.importorskip("mkdocs.config", reason="needs the docs extra")
    pytest.importorskip("material", reason="needs the docs extra")
    build = importlib.import_module("mkdocs.commands.build").build
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    config = mkdocs.load_config(str(SETTINGS), site_dir=str(tmp_path / "site"), strict=True)
    with caplog.at_level(logging.WARNING):
        build(config)
    assert [r.getMessage() for r in caplog.records if r.name.startswith("mkdocs")] == []
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|iframe)[^>]*\ssrc="(https?:[^"]*)|<link[^>]*stylesheet[^>]*(https?:[^"]*)',
            page.read_text(),
        )
        assert loaded == [], page
    assert (tmp_path / "site" / "benchmarks" / "results").is_dir()
    assert "|---|" not in (tmp_path / "site" / "performance" / "index.html").read_text(), (
        "README's table was not made one"
    )


def test_every_page_has_its_place_in_the_navigation() -> None:
    listed = list(nav_pages(settings()["nav"]))
    there = {page.name for page in DOCS.glob("*.md")}
    assert len(listed) == len(set(listed))
    assert there - set(listed) == set(), "pages that the navigation of mkdocs.yml lacks"
    assert set(listed) - there - {"benchmarks.md"} == set(), "pages of the navigation that are not there"


def test_readme_is_short_and_begins_with_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    first = next(block for block in blocks_of(ROOT / "README.md") if block.is_shell)
    assert first.line <= 10
    assert [command[0] for command in first.commands] == ["./launch/quickstart.sh", "./launch/test.sh"]


OUTSIDE = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "tests/README.md")),
    *sorted((ROOT / ".github").rglob("*.*")),
]
"""Pages and forms that are not part of the site of docs/."""
TESTS = ROOT / "tests" / "README.md"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    """mkdocs looks at the links of docs/."""
    text = page.read_text()
    for target, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", text):
        if target.startswith("https://"):
            continue
        # a form of GitHub is shown at OWNER/NAME/issues/new
        place = ROOT / target.removeprefix("../blob/main/") if ".github" in page.parts else page.parent / target
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), f"{target}#{anchor}"
    folders = "src|conf|docs|tests|launch|benchmarks|examples|model|config|export|data|train"
    for path in re.findall(rf"`((?:{folders}|\.ci|\.github)/[\w./-]*)`", text):
        is_placeholder = re.search("NAME|ORG|PACKAGE", path) is not None
        assert is_placeholder or (ROOT / path).exists() or (SOURCES / path).exists(), path


def test_what_is_shown_as_a_file_is_that_file() -> None:
    shown = [block for block in BLOCKS if block.kind == "file" and (ROOT / block.note).is_file()]
    assert [b.note for b in shown if (ROOT / b.note).read_text() != f"{b.text}\n"] == [] != shown


def test_every_helper_of_the_tests_is_explained() -> None:
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.+?) \|", TESTS.read_text(), re.MULTILINE))))
    assert {path.stem for path in TESTS.with_name("support").glob("*.py")} - named == set()


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\d\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.groups() == (citation["version"], citation["date-released"])
    assert citation["version"] == __version__


def test_forms_and_workflows_can_be_parsed() -> None:
    """GitHub ignores a file that it cannot read. The workflow checks nothing that .ci/run does not."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"], "versions stand in constraints.txt alone"
    for form in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        read = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} <= read.keys(), form.name
        asked = [part for part in read["body"] if part["type"] != "markdown"]
        assert len({part["id"] for part in asked}) == len(asked) and all(part["attributes"]["label"] for part in asked)
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step] == ["./.ci/run"]


def test_every_choice_of_a_group_is_named() -> None:
    """In the first table of docs/configuration.md, in the row of its group."""
    rows = dict(re.findall(r"^\|`(\w+)`\|(.+)\|$", (DOCS / "configuration.md").read_text(), re.MULTILINE))
    choices = [path for path in (ROOT / "conf").glob("*/*.yaml") if path.parent.name not in ("recipe", "hydra")]
    assert len(choices) > 40
    assert [path for path in choices if f"`{path.stem}`" not in rows.get(path.parent.name, "")] == []


def test_generated_pages_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/recipes.md has its own test, in golden/test_recipes.py."""
    moving = writer("make_moving", monkeypatch).pages()
    pictures = writer("make_pictures", monkeypatch).files()
    names = ("performance", "examples", "configuration", "models", "data", "preferences")
    tables = {f"{name}.md": writer(f"make_{name}", monkeypatch).page() for name in names}
    assert len(tables["configuration.md"].split()) <= 3000
    for name, text in {**moving, **pictures, **tables}.items():
        assert (DOCS / name).read_text() == text, f"{name} is not current; run: python docs/make_*.py"


def test_every_flag_and_key_of_other_systems_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    moving = writer("make_moving", monkeypatch)
    pages = {name: (DOCS / name).read_text() for name in ("from_llava.md", "from_deepspeed.md", "from_accelerate.md")}
    assert [n for n in moving.FLAGS if f"`--{n}`" not in pages["from_llava.md"]] == []
    assert [k for k in moving.DEEPSPEED if f"`{k.rstrip('*')}" not in pages["from_deepspeed.md"]] == []
    assert [k for k in moving.ACCELERATE if f"`{k}`" not in pages["from_accelerate.md"]] == []


@pytest.mark.parametrize("name", ["from_ms_swift.md", "from_llama_factory.md", "from_trl.md"])
def test_the_command_beside_a_trainers_is_what_migrate_prints(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    typed, printed = [block for block in BLOCKS if block.page == f"docs/{name}" and block.is_shell]
    request = parse(typed.commands[0][2:])
    (run,) = read_runs(request.paths, request.variables, request.gpus)
    migration = migrate(run)
    assert migration.lacks == [] and printed.text == lines(migration.words)


# --- commands


COMMANDS = sorted({
    (*entry, block.where) for block in SHELL for words in block.commands
    if (entry := entry_of([w for w in words if w != "..."])) and (entry := (entry[0], tuple(entry[1])))
})  # fmt: skip


def test_every_command_of_the_documents_composes(tmp_path: Path) -> None:
    """Keys and choices exist and go together, in commands that no test can run too."""
    write_files(tmp_path)
    assert len(COMMANDS) > 25
    seen = set()
    for module, arguments, where in COMMANDS:
        if (module, arguments) in seen:
            continue
        seen.add((module, arguments))
        try:
            if module == "llava_fsdp.migrate":
                parse(list(arguments))
            elif module in entries():
                composed(module, arguments, tmp_path)
            else:
                place = SOURCES / module.partition(".")[2].replace(".", "/")
                assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), module
        except Exception as error:
            raise AssertionError(f"{where}: {module} {shlex.join(arguments)}: {error}") from error


def write_files(folder: Path) -> None:
    """Files whose text a page shows."""
    for block in BLOCKS:
        if block.kind == "file":
            path = folder / block.note
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text + "\n")


def test_what_is_not_run_says_why() -> None:
    assert [b.where for b in BLOCKS if b.kind and not b.note] == []
    others = {"llava_fsdp", "llava-fsdp", "quickstart.sh", "test.sh", "pip"}
    unknown = [
        (block.where, words[0]) for block in SHELL if block.kind != "norun" for words in block.commands
        if entry_of(words) is None and not any(name in word for name in others for word in words)
    ]  # fmt: skip
    assert unknown == [], "commands of no entry need a note: <!-- norun: WHY -->"


# --- keys and messages


def own_schemas() -> list[type]:
    return [getattr(schemas, schema) for _, schema in entries().values()] + [schemas.SweepConfig]


def test_keys_in_backticks_exist() -> None:
    """Of the form GROUP.NAME, where GROUP has keys: `optim.lr`, `data.path=FILE`."""
    keys = {key for schema in own_schemas() for key in schema_keys(schema)}
    groups = {key.partition(".")[0] for key in keys if "." in key}
    files = re.compile(r"\.(?:py|md|json|jsonl|yaml|safetensors|html|bin|png|txt|sh|gz|pickle|tmp|gguf)$")
    unknown = []
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), start=1):
            for word in re.findall(r"`([a-z_]+\.[a-z_0-9.]+)(?:=[^`]*)?`", line):
                group = word.partition(".")[0]
                theirs = page.name in (
                    "from_deepspeed.md",
                    "artifacts.md",
                    "checkpoints.md",
                    "architecture.md",
                    "decisions.md",
                )
                if group in groups and word not in keys and not files.search(word) and not theirs:
                    unknown.append(f"{page.name}:{number} {word}")
    assert unknown == []


def test_every_key_is_explained() -> None:
    """docs/configuration.md names every key of a training, or its group as `group.*`."""
    text = (DOCS / "configuration.md").read_text()
    words = {word for span in re.findall(r"`([^`]+)`", text) for word in re.findall(r"[\w.*]+", span)}
    shown = lambda key: key in words or f"{key.rpartition('.')[0]}.*" in words or f".{key.rpartition('.')[2]}" in words  # noqa: E731
    keys = set(schema_keys(schemas.Config))
    leaves = {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    # groups choose these, sources are named by their own keys
    chosen = {"data.sources", "stage.name", "stage.corpus", "model.name", "data.source", "data.root", "sampler.name",
              "sharding.strategy", "activation_checkpointing.mode", "offload.mode", "compat.name"}  # fmt: skip
    assert sorted(key for key in leaves - chosen if not shown(key)) == []


def spoken() -> str:
    """The text of the sources with literals joined, braces emptied and quotes left out."""
    texts = []
    for path in sorted(SOURCES.rglob("*.py")):
        text = re.sub(r"['\"]\s*\n\s*(?:\+ )?[rf]*['\"]", "", path.read_text())
        texts.append(re.sub(r"\{[^{}]*\}|%[sdg]|%\.\d[fg]", "...", text))
    texts += [path.read_text() for path in (ROOT / "launch").glob("*.sh")]
    return re.sub(r"\s+", " ", "\n".join(texts))


def messages() -> Iterator[tuple[str, str]]:
    """What the pages say that a user sees: first cells of tables, in backticks, and blocks of text."""
    for block in (b for b in BLOCKS if b.page == "docs/troubleshooting.md" and b.language == "text"):
        for line in block.text.splitlines():
            yield block.where, line
    for name in ("troubleshooting.md", "faults.md"):
        for number, line in enumerate((DOCS / name).read_text().splitlines(), start=1):
            if line.startswith("| `"):
                for span in re.findall(r"`([^`]*[a-z] [^`]*)`", line.split(" | ")[0]):
                    yield f"docs/{name}:{number}", span


def test_messages_are_those_of_the_code() -> None:
    """Word by word, where a message is cited; `...` stands for what differs."""
    said = spoken()
    missing = []
    for where, message in messages():
        for part in re.split(r"\.\.\.|\b[A-Z]\b|KEY=VALUE|[:;,()?]|\d+", message):
            part = part.strip()
            if len(part) > 7 and " " in part and part not in said:
                missing.append(f"{where}: {part}")
    assert missing == []


# --- run for real

ADAPTERS = ("global_batch_size=8", "max_steps=2", "data.max_length=256")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which both stages and an adapter have been trained, for a few steps each."""
    pytest.importorskip("peft", reason="needs the lora extra")
    folder = tmp_path_factory.mktemp("trained")
    for stage in ("pretrain", "finetune", "finetune_lora"):
        done = command("llava_fsdp.train", f"stage={stage}", *ADAPTERS, "optim.warmup_ratio=0", cwd=folder, timeout=900)
        assert done.returncode == 0, done.stderr[-3000:]
    return folder


def write_a_readers_files(folder: Path) -> None:
    """What the pages call by name and a reader has: LLaVA's script, DeepSpeed's and Accelerate's files, a picture."""
    golden = ROOT / "tests" / "golden" / "open" / "configs"
    flags = json.loads((golden / "v1_5_finetune.json").read_text())["explicit_cli"]
    without_zero = {name: value for name, value in flags.items() if name != "deepspeed"}
    for name, launcher, own in (
        ("finetune.sh", "deepspeed", flags),
        ("train.sh", "accelerate launch --config_file accelerate.yaml", without_zero),
    ):
        words = " ".join(f"--{flag} {value}" for flag, value in own.items())
        (folder / name).write_text(f"{launcher} llava/train/train_mem.py {words}\n")
    shutil.copy(golden / "zero3.json", folder)
    (folder / "accelerate.yaml").write_text("distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n")
    Image.new("RGB", (64, 48), "orange").save(folder / "cat.jpg")
    write_files(folder)


def shortened(words: list[str]) -> list[str]:
    """The command as a page has it, of fewer steps and questions: what is proven is that it works."""
    entry = entry_of(words)
    said = {word.partition("=")[0] for word in words}
    if entry and entry[0] == "llava_fsdp.train" and not said & {"max_steps", "dry_run", "--cfg"}:
        words = [*words, "max_steps=3"]
        words += [] if "global_batch_size" in said else ["global_batch_size=8"]
    if entry and entry[0] == "llava_fsdp.evaluate":
        words = [*(w for w in words if not w.startswith("limit=")), "limit=3"]
    if entry and entry[0] == "llava_fsdp.sweep":
        words = [*(w for w in words if not w.startswith("launch.nproc")), "launch.nproc_per_node=2", "max_steps=2"]
        words += ["global_batch_size=8"]
    return words


def runnable(page: Path) -> list[Block]:
    """Blocks of a page that a test runs; launch/quickstart.sh and launch/test.sh have tests of their own."""
    found = [b for b in blocks_of(page) if b.kind == "run" or (b.is_shell and b.kind != "norun")]
    return [b for b in found if b.kind == "run" or not any(w[0].startswith("./launch/") for w in b.commands)]


RUNNABLE = [page for page in PAGES if runnable(page)]


def run_in(folder: Path, words: list[str]) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    return subprocess.run(
        words, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=900,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.stem)
def test_commands_of_a_page_run_in_order(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    write_a_readers_files(tmp_path)
    for block in runnable(page):
        if block.kind == "after" and not (tmp_path / "outputs").exists():
            trained = request.getfixturevalue("trained")
            shutil.copytree(trained / "outputs", tmp_path / "outputs", symlinks=True)
        commands = [shortened(words) for words in block.commands if words[0] != "pip"]  # nothing is installed
        if block.kind == "run":
            (tmp_path / "example.py").write_text(block.text + "\n")
            starts = {"python": ["python"], "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2"]}
            commands = [[*starts[block.note], "example.py"]]
        for words in commands:
            done = run_in(tmp_path, words)
            assert done.returncode == 0, (
                f"{block.where}: {shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
            )


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.stem)
def test_names_that_examples_import_exist(page: Path) -> None:
    trees = [ast.parse(block.text) for block in runnable(page) if block.kind == "run"]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    for node in imports:
        assert node.module is not None
        module = importlib.import_module(node.module)
        assert [] == [name.name for name in node.names if not hasattr(module, name.name)], page


@pytest.mark.slow
def test_programs_of_the_documents_are_typed(tmp_path: Path) -> None:
    """Programs of a user get the package's types: it has py.typed, without which pyright misses stubs."""
    pytest.importorskip("pyright", reason="needs the dev extra")
    for number, block in enumerate(b for b in BLOCKS if b.kind == "run" or b.note.endswith("my_training.py")):
        own = "# pyright: basic, reportMissingTypeStubs=true, reportPrivateImportUsage=false\n"
        (tmp_path / f"program_{number}.py").write_text(own + block.text + "\n")
    done = run_in(tmp_path, [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "."])
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_loop_of_ones_own_is_short_and_learns(tmp_path: Path) -> None:
    """At one rank, where nothing is sharded; the slow tier runs it on two."""
    (block,) = [b for b in BLOCKS if b.kind == "run" and b.note == "torchrun"]
    assert len(block.text.splitlines()) <= 36
    (tmp_path / "example.py").write_text(block.text)
    done = run_in(tmp_path, ["python", "example.py", "sharding=zero2"])
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 10 and losses[-1] < losses[0]
