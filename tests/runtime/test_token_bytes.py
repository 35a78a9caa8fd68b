"""Bytes of tokens, one after the other, are those of the text, however characters are shared."""

from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from freight.runtime.token_bytes import TokenBytes, _letters

TEXTS = st.text(st.sampled_from("aé 世\n🎉x"), max_size=20)


def byte_level() -> tokenizers.Tokenizer:
    """Each byte a token, and two of the more usual ones joined."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate(letters)}
    vocabulary["Ġa"] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<é>", special=True)])
    return backend


def with_bytes() -> tokenizers.Tokenizer:
    """Pieces of text, and a token for each byte, as Llama 2's has them."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "é", "\u2581", "\u2581a"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: place for place, piece in enumerate(pieces)},
            merges=[("\u2581", "a")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


@given(text=TEXTS)
def test_bytes_of_a_text(text: str) -> None:
    for backend in (byte_level(), with_bytes()):
        bytes_of = TokenBytes(backend)
        found = [bytes_of(token_id) for token_id in backend.encode(text).ids]
        assert b"".join(found) == text.encode()


def test_tokens_that_are_no_bytes() -> None:
    """Special ones are their text, others nothing."""
    backend = byte_level()
    bytes_of = TokenBytes(backend)
    assert bytes_of(backend.token_to_id("<é>")) == "<é>".encode()
    assert bytes_of(99_999) == b""
    plain = TokenBytes(tokenizers.Tokenizer(models.WordLevel({"\u2581x": 0}, unk_token="\u2581x")))
    assert plain(0) == "\u2581x".encode()


def test_letters_are_those_of_the_library() -> None:
    assert {*_letters()} == {*pre_tokenizers.ByteLevel.alphabet()}
    assert sorted(_letters().values()) == [*range(256)]
