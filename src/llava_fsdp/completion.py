"""Print the code that makes a shell complete `llava-fsdp` commands: `llava-fsdp completion bash`, or zsh.

For each word to complete, this code calls `llava-fsdp completion words COMMAND WORD`, which prints the completions.
"""

from llava_fsdp.runtime.process.safe_path import prepare_python

if __name__ == "__main__":
    prepare_python()  # before other imports, which files there might hide

import sys

from llava_fsdp import config
from llava_fsdp.commands import COMMANDS
from llava_fsdp.config import config_dir, schema_keys

SCRIPT = """\
# eval "$(llava-fsdp completion bash)" in ~/.bashrc; in ~/.zshrc the same with zsh
_llava_fsdp() {
    local word="${COMP_LINE:0:COMP_POINT}"
    word="${word##* }"
    COMPREPLY=()
    local found cut=""
    [[ "$word" != *=* || "$COMP_WORDBREAKS" != *=* ]] || cut="${word%%=*}="
    while IFS= read -r found; do
        COMPREPLY+=("${found#"$cut"}")
    done < <(llava-fsdp completion words "${COMP_WORDS[1]}" "$word" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 0 ]]; then
        while IFS= read -r found; do
            COMPREPLY+=("$found")
        done < <(compgen -f -- "${word#*=}")
    elif [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *= ]]; then
        compopt -o nospace
    fi
}
complete -F _llava_fsdp llava-fsdp
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\ncompopt() { true; }\n"


def main() -> None:
    """Print the shell's completion script, or the completions of a word, which the script asks for."""
    match sys.argv[1:]:
        case ["bash"]:
            print(SCRIPT, end="")
        case ["zsh"]:
            print(ZSH + SCRIPT, end="")
        case ["words", command, word]:
            for completion in completions(command, word):
                print(completion)
        case _:
            print("usage: llava-fsdp completion bash|zsh", file=sys.stderr)
            sys.exit(2)


def completions(command: str, word: str) -> list[str]:
    """Return what `word`, the text being typed at the end of `llava-fsdp COMMAND ...`, can become. After `GROUP=`:
    `GROUP=CHOICE` for every YAML file in Hydra's config group GROUP. Else the command's configuration keys that begin
    with `word`, each followed by `=`. If the name of the command is itself being typed (`command` equals `word`), names
    of commands are returned."""
    if command not in COMMANDS or not COMMANDS[command].keys:
        return [name for name in COMMANDS if name.startswith(word)] if command == word else []
    group, equals, begun = word.partition("=")
    if equals:
        stems = sorted(path.stem for path in (config_dir() / group).glob("*.yaml")) if group.isidentifier() else []
        return [f"{group}={stem}" for stem in stems if stem.startswith(begun)]
    keys = schema_keys(getattr(config, COMMANDS[command].keys))
    groups = {key.rpartition(".")[0] for key in keys}
    takes_value = [key for key in keys if key not in groups or (config_dir() / key).is_dir()]
    return [f"{key}=" for key in takes_value if key.startswith(word)]


if __name__ == "__main__":
    main()
