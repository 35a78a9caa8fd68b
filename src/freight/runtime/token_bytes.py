"""The bytes that a token stands for: of characters that several tokens share, each has some.

Byte-level vocabularies write a byte as a character, others have pieces of text, with a mark for
spaces, and tokens such as <0xE2> for bytes that no piece has.
"""

from __future__ import annotations

import re
from typing import Final

import tokenizers

__all__ = ["TokenBytes"]

_BYTE: Final = re.compile("<0x([0-9A-F]{2})>")
_SPACE: Final = "\u2581"


def _letters() -> dict[str, int]:
    """Of each byte the character that byte-level vocabularies write: its own where it is printed,
    else those from U+0100 on in turn."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


class TokenBytes:
    """Of one tokenizer; called with a token's id."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = {*backend.get_added_tokens_decoder()}
        decoder = backend.decoder
        kind = "" if decoder is None else decoder.__getstate__().decode()
        self._letters = _letters() if '"ByteLevel"' in kind else {}
        self._has_bytes = '"ByteFallback"' in kind
        self._marks_spaces = '"Metaspace"' in kind or _SPACE in kind

    def __call__(self, token_id: int) -> bytes:
        """b"" where the tokenizer has no such token."""
        piece = self._backend.id_to_token(token_id)
        if piece is None or token_id in self._added:
            return (piece or "").encode()
        if self._letters and all(letter in self._letters for letter in piece):
            return bytes(self._letters[letter] for letter in piece)
        if self._has_bytes and (found := _BYTE.fullmatch(piece)) is not None:
            return bytes.fromhex(found[1])
        return (piece.replace(_SPACE, " ") if self._marks_spaces else piece).encode()
