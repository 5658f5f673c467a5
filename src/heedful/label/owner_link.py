"""The owner's one-time link, which whoever may write to a project's folder can make, also while it is served.

PROJECT/owner-link.json has the SHA-256 of its token and the time of its end. A new link replaces it, signing in removes it.
"""

import hmac
import json
import os
import secrets
import time
from pathlib import Path

from heedful.label.identity import token_hash

FILE = "owner-link.json"
MINUTES = 15.0
"""How long the link can be used."""


def make_owner_link(folder: Path) -> str:
    """Return the token of a new link. The file is for this user's eyes only from its first byte on."""
    token = secrets.token_urlsafe(32)
    temporary = folder / f"{FILE}.{secrets.token_hex(8)}"
    content = json.dumps({"hash": token_hash(token), "until": time.time() + 60 * MINUTES})
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(content)
    temporary.replace(folder / FILE)
    return token


def take_owner_link(folder: Path, token: str) -> bool:
    """Return whether a token is that of the link, which then counts no more. A clock that was set back lengthens nothing."""
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        is_right = hmac.compare_digest(str(content["hash"]), token_hash(token))
        left = float(content["until"]) - time.time()
    except (OSError, ValueError, TypeError, KeyError):
        return False  # there is none, or nobody can use it
    if not is_right:
        return False
    try:
        (folder / FILE).unlink()
    except OSError:
        return False  # somebody was quicker
    return 0 < left <= 60 * MINUTES
