"""Recognise secrets, and hide them in texts."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "***"
NAMES = re.compile(
    r"(?:(?:.*[._-])?(?:secret|passwd|password|passphrase|credentials?|authorization|api_?key|access_?key|secret_?key"
    r"|private_?key|account_?key|pat)"
    r"|(?:.*[._-])?(?:hf|hub|hugging_?face|access|auth|api|bearer|refresh|session|wandb|git(?:hub|lab)|private|user)"
    r"[._-]?token|auth|token(?![._-]id))(?:[._-](?:id|key|value|file|path))?",
    re.IGNORECASE,
)
"""Names of keys, flags and variables that hold secrets. Matches `hub_token` and `WANDB_API_KEY`, but not `image_token`,
`token_id` or `chunk_tokens`."""
ENV_NAMES = re.compile(
    r"(?i)(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|ACCESS_?KEY|CREDENTIALS?|PAT)(?:_|$)"
)
VALUES = re.compile(
    r"\b(?:hf_(?=[A-Za-z]*\d)[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{16,}"
    r"|sk-(?:[\w-]*[_-])?(?=[A-Za-z]*\d)[A-Za-z0-9]{20,}[\w-]*|gh[pousr]_[A-Za-z0-9]{16,}"
    r"|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
)
LOGIN = re.compile(r"(?<=://)[^\s/@'\"]*:[^\s/@'\"]*(?=@)")
"""`user:password` in a URL."""
VALUE = r"(?P<value>[^\s,;&'\"]+|'[^']*'|\"[^\"]*\")"
ASSIGNED = re.compile(r"(?P<name>[\w.-]+)(?P<sign>['\"]?\s*[=:]\s*)" + VALUE)
FLAG = re.compile(r"(?P<name>--[\w.-]+)(?P<sign>\s+)" + VALUE)


def is_secret_name(name: str) -> bool:
    return NAMES.fullmatch(name.lstrip("+~-")) is not None


def is_secret_variable(name: str) -> bool:
    return ENV_NAMES.search(name) is not None


def has_secret(text: str) -> bool:
    """Return whether a text contains what looks like a secret (an access token, or a password in a URL)."""
    return VALUES.search(text) is not None or LOGIN.search(text) is not None


def secrets_of(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the values of the environment variables that hold secrets, the longest first."""
    values = {value for name, value in env.items() if is_secret_variable(name) and len(value) >= 8}
    return sorted(values, key=len, reverse=True)


def redact(text: str, known: Iterable[str] = ()) -> str:
    """Replace secrets in a text by `***`: what looks like one, values that follow a name like `hub_token`, and those in
    `known`."""
    for secret in known:
        text = text.replace(secret, HIDDEN)
    text = LOGIN.sub(HIDDEN, VALUES.sub(HIDDEN, text))
    return FLAG.sub(hide, ASSIGNED.sub(hide, text))


def redact_values(values: Mapping[str, Any], known: Iterable[str] = ()) -> dict[str, Any]:
    """Return configuration values in which secrets are replaced by `***`: in texts and lists of texts, what looks like
    a secret, values that follow a name like `hub_token`, and the texts in `known`. The value of a key that is named
    like a secret is replaced as a whole."""
    known = list(known)

    def clean(value: Any, is_secret: bool) -> Any:
        """Return a value, or a list of values, with secrets replaced: each text as a whole if `is_secret`."""
        if isinstance(value, str):
            return HIDDEN if is_secret and value else redact(value, known)
        if isinstance(value, list | tuple):
            return [clean(item, is_secret) for item in value]
        return value

    return {key: clean(item, any(map(is_secret_name, (key, key.rpartition(".")[2])))) for key, item in values.items()}


def hide(found: re.Match[str]) -> str:
    """Return what `re.sub` puts for a match of `name=value` or `--name value`: with `***` for the value of a secret."""
    if not is_secret_name(found["name"]) or found["value"] in ("null", "None", "True", "False"):
        return found[0]
    return f"{found['name']}{found['sign']}{HIDDEN}"
