"""Texts that come from scripts, made harmless for a terminal and a page, and cut.

Called by the reports, the live page and `grpo-run top` for everything that they quote. Markup is not escaped
here, but where a text is put into a page. Pure.
"""

from __future__ import annotations

MAX_CHARACTERS = 2_000
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_HIDDEN = dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)
_VISIBLE = _PICTURES | _HIDDEN
"""Control characters, as a terminal obeys them, and orders of writing direction."""


def clean(text: object, most: int = MAX_CHARACTERS) -> str:
    """Return a text without control characters, orders of writing direction and halves of surrogate pairs.

    Args:
        text: of a script, or anything that is converted to a text.
        most: characters, beyond which it is cut.
    """
    whole = str(text)
    shown = whole[:most].translate(_VISIBLE).encode(errors="backslashreplace").decode()
    return f"{shown}… ({len(whole):,} characters)" if len(whole) > most else shown
