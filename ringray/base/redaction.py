"""Texts that leave the process: without secrets, and without what a terminal would obey.

Whatever is printed, logged, stored or sent on may quote what somebody else wrote: a URI with a
password in it, the answer of a server, the error of a rank, a name out of a store. ``hidden`` takes
secrets out of it, ``plain`` what is no text. Imports nothing heavy.
"""

from __future__ import annotations

import os
import re
from typing import Any

TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # variables that hold or name a token of Ray
HIDDEN = "***"
# Bytes that no text needs and terminals obey: C0 but for tab and newline, DEL, C1; and the signs
# that turn the direction of what follows, by which a name can look like another one.
UNPRINTABLE = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
_UNPRINTABLE = re.compile(f"[{UNPRINTABLE}]")
_SHORTEST = 8  # characters of an environment variable that is looked for: "true" is no secret
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
_PATTERNS = (
    # Greedy: a password may hold what it should not, as in ://user:p@ss/word@host.
    (re.compile(r"(://)(?!/)(?:[^\s'\"<>]|['\"<>](?![\s,:}\])]))*@"), rf"\1{HIDDEN}@"),
    (re.compile(rf"(?i)([?&;](?:[\w-]*?(?:{_WORDS}|signature)|sig)=)[^&;\s'\"<>]+"),
     rf"\1{HIDDEN}"),
    # Options within an option, as ODBC has them.
    (re.compile(rf"(?i)((?:{_WORDS})%3d)(?:(?!%3b)[^&;\s'\"<>])+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b((?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?)(?:(basic|bearer)\s+)?"
                r"[^\s'\",]+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b(basic|bearer)\s+[A-Za-z0-9._~+/-]{16,}=*"), rf"\1 {HIDDEN}"),
    (re.compile(rf"(?i)(?<![\w-])((?:\w+_)?(?:{_WORDS})\s*[=:]\s*)(?!\*\*\*)[^\s,;&'\"<>]{{4,}}"),
     rf"\1{HIDDEN}"),
)  # fmt: skip


def hidden(text: str) -> str:
    """``text`` without passwords in URLs, values behind names of secrets, authorisation headers,
    and without the secrets of this process's environment, wherever they stand."""
    for value in _secrets():
        text = text.replace(value, HIDDEN)
    return without_credentials(text)


def without_credentials(text: str) -> str:
    """As ``hidden``, of what can be told from the text alone: ``https://user:secret@host`` becomes
    ``https://***@host``."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def plain(text: str, sign: str = "\ufffd") -> str:
    """``text`` with ``sign`` in place of each character that a terminal would obey; newlines and
    tabs stay."""
    return _UNPRINTABLE.sub(sign, text)


def shown(text: str) -> str:
    """For a screen: ``hidden`` and ``plain``."""
    return plain(hidden(text))


def has_password(uri: str) -> bool:
    """Whether a URI carries a secret that belongs into the environment."""
    return without_credentials(uri) != uri


def public_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """A canonical spec without a password in its tracking URI."""
    tracking: Any = spec.get("tracking")
    uri = tracking.get("uri") if isinstance(tracking, dict) else None
    if not isinstance(uri, str):
        return spec
    return {**spec, "tracking": {**tracking, "uri": without_credentials(uri)}}


def _secrets() -> list[str]:
    """Values of environment variables with the name of a secret, the longest first."""
    found = {
        value.strip()
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name) and len(value.strip()) >= _SHORTEST
    }
    return sorted(found, key=len, reverse=True)
