"""What is loaded cannot run code, because nothing in the package runs what it has loaded."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "llava_fsdp"
NEVER = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execv", "yaml.load", "yaml.unsafe_load",
    "yaml.full_load", "importlib.import_module", "hydra.utils.instantiate", "hydra.utils.call", "instantiate",
    "runpy.run_path", "runpy.run_module", "marshal.loads", "shelve.open", "dill.load", "joblib.load",
    "torch.hub.load", "jinja2.Template", "pickle.loads", "pickle.Unpickler",
}  # fmt: skip
NEEDED = {
    "torch.load": {"weights_only": True},
    "np.load": {"allow_pickle": False},
    "AutoConfig.from_pretrained": {"trust_remote_code": False, "local_files_only": True},
    "AutoTokenizer.from_pretrained": {"trust_remote_code": False, "local_files_only": True},
    "PreTrainedTokenizerFast.from_pretrained": {"trust_remote_code": False, "local_files_only": True},
    "AutoModelForImageTextToText.from_pretrained": {"trust_remote_code": False, "local_files_only": True},
    "AutoModel.from_config": {"trust_remote_code": False},
    "AutoImageProcessor.from_pretrained": {"trust_remote_code": False, "local_files_only": True},
    "AutoProcessor.from_pretrained": {"trust_remote_code": False, "local_files_only": True},
    "AutoModelForCausalLM.from_config": {"trust_remote_code": False},
    "AutoModelForCausalLM.from_pretrained": {"trust_remote_code": False, "local_files_only": True},
    "AutoModelForImageTextToText.from_config": {"trust_remote_code": False},
    "kind.from_config": {"trust_remote_code": False},
    "causal.from_config": {"trust_remote_code": False},
    "kind.from_pretrained": {"trust_remote_code": False, "local_files_only": True, "weights_only": True},
    "GenerationConfig.from_pretrained": {"local_files_only": True},
    "peft.PeftModel.from_pretrained": {},  # of a folder that this process has just written, as safetensors
}
OWN_COMMANDS = {
    ("__init__.py", "importlib.import_module"),
    ("runtime/callable_package.py", "importlib.import_module"),
    ("commands.py", "importlib.import_module"),
    ("runtime/process/limited_process.py", "importlib.import_module"),
    ("chat/image_process.py", "pickle"),
    ("chat/image_process.py", "pickle.loads"),
}
"""Run commands and functions of this package, by names that stand in the source; and give a child process an object of
this program through a pipe that nobody else can write to."""
OWN_COLUMN = ("data/index/examine/duplicate_ids.py", "np.load")
"""Maps a file that this process wrote a moment ago, for writing; NumPy's own default is allow_pickle=False."""


def faults_in(text: str, file: str) -> Iterator[str]:
    """What a source must not do, with its line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                kinds = "pickle", "cPickle", "dill", "shelve", "marshal", "joblib"
                if name.partition(".")[0] in kinds and (file, name) not in OWN_COMMANDS:
                    yield f"{file}:{node.lineno} imports {name}"
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {key.arg: getattr(key.value, "value", key.value) for key in node.keywords}
        if name in NEVER and (file, name) not in OWN_COMMANDS:
            yield f"{file}:{node.lineno} calls {name}"
        if given.get("shell") is True or given.get("trust_remote_code") not in (None, False):
            yield f"{file}:{node.lineno} calls {name} with {given}"
        for key, value in NEEDED.get(name, {}).items():
            if given.get(key) is not value and (file, name) != OWN_COLUMN:
                yield f"{file}:{node.lineno} calls {name} without {key}={value}"
        if name.endswith((".from_pretrained", ".from_config")) and name not in NEEDED:
            yield f"{file}:{node.lineno} calls {name}, which is not known to this test"


def test_nothing_that_is_loaded_is_run() -> None:
    found = [
        fault
        for path in sorted(SOURCES.rglob("*.py"))
        for fault in faults_in(path.read_text(), path.relative_to(SOURCES).as_posix())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "eval(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "AutoConfig.from_pretrained(folder)",
        "AutoModel.from_config(config, trust_remote_code=cfg.trust)",
        "Thing.from_pretrained(folder)",
        "hydra.utils.instantiate(node)",
        "importlib.import_module(name)",
    ],
)
def test_it_would_be_found(text: str) -> None:
    assert list(faults_in(text, "model/x.py"))
