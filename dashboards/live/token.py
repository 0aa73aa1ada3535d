"""The token of the live page, which is a part of its address and kept in a file of this user.

Read by `grpo-run serve`, and by `grpo-run launch`, whose server has the page of its run. Imports no server.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.files import replace_file

TOKEN_BYTES = 24
MIN_TOKEN_CHARACTERS = 20


def read_token(file: Path | None) -> str:
    """Return the token in a file that only this user can read; make one if there is none.

    Raises:
        UsageError: there is no home directory for it, it cannot be written, or others can read it.
    """
    if file is None:
        raise UsageError("there is no home directory to keep the token in; set XDG_STATE_HOME")
    try:
        with contextlib.suppress(FileNotFoundError):
            found = file.lstat()
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise UsageError(f"{file} must be yours and have mode 0600; delete it, and a new one is made")
            token = file.read_text().strip()
            if len(token) >= MIN_TOKEN_CHARACTERS and token.isascii() and "/" not in token:
                return token
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        token = secrets.token_urlsafe(TOKEN_BYTES)
        replace_file(file, f"{token}\n".encode())
    except OSError as error:
        raise UsageError(f"cannot keep the token of the page in {file}: {error.strerror}") from error
    return token
