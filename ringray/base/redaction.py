"""Texts that leave the process: without secrets and terminal control characters.

Printed, logged, stored and sent texts may quote foreign input: a URI with a password, the answer of
a server, the error of a rank, a name from a store. ``hidden`` removes secrets, ``plain`` control
characters. Imports nothing heavy.
"""

from __future__ import annotations

import os
import re
from typing import Any

TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # variables that hold or name a token of Ray
HIDDEN = "***"
# Control characters: C0 but for tab and newline, DEL, C1; and the characters that change the
# direction of text, with which one name can look like another.
UNPRINTABLE = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
_UNPRINTABLE = re.compile(f"[{UNPRINTABLE}]")
_SHORTEST = 8  # characters of a secret in the environment: "true" is not one
_SECRET_NAME = re.compile(
    r"^PGPASSWORD$|^MYSQL_PWD$"
    r"|(?:^|_)(?:TOKEN|PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIALS?|API_?KEY|ACCESS_?KEY"
    r"|PRIVATE_?KEY|SECRET_?ACCESS_?KEY|ACCOUNT_?KEY|CONNECTION_STRING)$",
    re.IGNORECASE,
)
_WORDS = (
    r"passw(?:or)?d|passphrase|pwd|ssl_?password|token|access_?token|auth_?token|secret|api_?key"
    r"|access_?key|secret_?access_?key|private_?key"
)
# Greedy: a password may hold forbidden characters, as in ://user:p@ss/word@host.
_URL = r"(://)(?!/)(?:[^\s'\"<>]|['\"<>](?![\s,:}\])]))*@"
_QUERY = rf"(?i)([?&;](?:[\w-]*?(?:{_WORDS}|signature)|sig)=)[^&;\s'\"<>]+"
_ODBC = rf"(?i)((?:{_WORDS})%3d)(?:(?!%3b)[^&;\s'\"<>])+"  # options within an option
_HEADER = r"(?i)\b((?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?)(?:(basic|bearer)\s+)?[^\s'\",]+"
_BEARER = r"(?i)\b(basic|bearer)\s+[A-Za-z0-9._~+/-]{16,}=*"
_NAMED = rf"(?i)(?<![\w-])((?:\w+_)?(?:{_WORDS})\s*[=:]\s*)(?!\*\*\*)[^\s,;&'\"<>]{{4,}}"
_PATTERNS = [(re.compile(_URL), rf"\1{HIDDEN}@")]
_PATTERNS += [(re.compile(secret), rf"\1{HIDDEN}") for secret in (_QUERY, _ODBC, _HEADER)]
_PATTERNS += [(re.compile(_BEARER), rf"\1 {HIDDEN}"), (re.compile(_NAMED), rf"\1{HIDDEN}")]


def hidden(text: str) -> str:
    """Returns ``text`` without passwords in URLs, values after names of secrets, authorisation
    headers, and the secrets of this process's environment."""
    for value in _secrets():
        text = text.replace(value, HIDDEN)
    return without_credentials(text)


def without_credentials(text: str) -> str:
    """Does the part of ``hidden`` that needs the text only: ``https://user:secret@host`` becomes
    ``https://***@host``."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def plain(text: str, sign: str = "\ufffd") -> str:
    """Returns ``text`` with ``sign`` in place of each control character but newlines and tabs."""
    return _UNPRINTABLE.sub(sign, text)


def shown(text: str) -> str:
    """Returns ``text`` for a screen: ``hidden`` and ``plain``."""
    return plain(hidden(text))


def has_password(uri: str) -> bool:
    """Returns whether a URI holds a secret, which belongs in the environment."""
    return without_credentials(uri) != uri


def public_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns a canonical spec without the password of its tracking URI."""
    tracking: Any = spec.get("tracking")
    uri = tracking.get("uri") if isinstance(tracking, dict) else None
    if not isinstance(uri, str):
        return spec
    return {**spec, "tracking": {**tracking, "uri": without_credentials(uri)}}


def _secrets() -> list[str]:
    """Returns the values of environment variables named like a secret, longest first."""
    secrets = {
        value.strip()
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name) and len(value.strip()) >= _SHORTEST
    }
    return sorted(secrets, key=len, reverse=True)
