"""Text to token ids and back, from the files beside a checkpoint.

Gives what transformers gives for the same files without importing it: special tokens come from
tokenizer.json's post-processor, chats from the model's own template. Knows no tensors, no rows and
no engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

import tokenizers

from freight.errors import ModelError
from freight.runtime.chat_template import ChatTemplate, read_chat_template
from freight.runtime.guide import Guides
from freight.runtime.token_bytes import TokenBytes

__all__ = ["Detokenizer", "Tokenizer", "has_tokenizer", "open_tokenizer"]

_OLDER_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json", "vocab.txt")

# A held-back stretch of tokens is given up as broken text after this many; see Detokenizer.
_MOST_HELD_TOKENS = 64
_BROKEN = "\ufffd"
_KEPT_TEXTS: Final = 1 << 15


@dataclass(frozen=True, kw_only=True, slots=True)
class _Before:
    """Tokens that others stand behind, and their text."""

    ids: tuple[int, ...]
    text: str


class Tokenizer:
    """The tokenizer of one model directory.

    ``eos_token_ids`` are the ids that end a row, from generation_config.json, else config.json,
    else tokenizer_config.json. ``prefix_token_id`` stands before a text that has nothing before it:
    the beginning of a sequence, else its end. ``vocab_size`` counts the tokenizer's own entries; a
    checkpoint's embedding may have more rows.
    """

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._backend = _load_backend(model_dir)
        self._backend.no_truncation()
        self._backend.no_padding()
        config = _read_json(model_dir / "tokenizer_config.json")
        named = _special_tokens({**_read_json(model_dir / "special_tokens_map.json"), **config})
        self._chat: ChatTemplate | None = read_chat_template(model_dir, config, named)
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids: frozenset[int] = self._find_eos(named.get("eos_token"))
        self.prefix_token_id = self._find_prefix(named)
        self.token_text: Callable[[int], str] = lru_cache(_KEPT_TEXTS)(self._token_text)
        """One token by itself, special or not; part of a character is U+FFFD."""
        self.token_bytes: Callable[[int], bytes] = lru_cache(_KEPT_TEXTS)(self._token_bytes)
        """What a token stands for; of a character that tokens share each has some."""

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    @property
    def chat_template(self) -> str | None:
        """The source of the model's own, where it has one."""
        return None if self._chat is None else self._chat.source

    @cached_property
    def guides(self) -> Guides:
        """What keeps answers to what they must look like; made when it is first asked for."""
        known = {own for own in self.eos_token_ids if own < self.vocab_size}
        return Guides(self._backend.to_str(), known)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model expects around it."""
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """``encode`` of many texts at once, on all cores; without special tokens for chats."""
        encodings = self._backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    def decode_answer(self, ids: Sequence[int]) -> str:
        """``decode`` of what comes behind a prompt: some decoders take the first space off a text,
        and this is taken for no text's beginning."""
        return self._decode_behind(ids, skips_special=True)

    def _decode_behind(self, ids: Sequence[int], *, skips_special: bool) -> str:
        before = self._letter
        own = [*before.ids, *ids]
        text: str = self._backend.decode(own, skip_special_tokens=skips_special)
        return text.removeprefix(before.text)

    @cached_property
    def _letter(self) -> _Before:
        """A token to decode others behind, where that is another text."""
        decoder = self._backend.decoder
        kind = "" if decoder is None else decoder.__getstate__().decode()
        if '"Strip"' not in kind and '"Metaspace"' not in kind:
            return _Before(ids=(), text="")
        added = self._backend.get_added_tokens_decoder()
        pieces = self._backend.get_vocab(with_added_tokens=False).items()
        plain = [own for own in pieces if own[0].isalpha() and own[1] not in added]
        for piece, number in sorted(plain, key=lambda own: (not own[0].isascii(), own)):
            if self._backend.decode([number], skip_special_tokens=True) == piece:
                return _Before(ids=(number,), text=piece)
        return _Before(ids=(), text="")

    def _token_text(self, token_id: int) -> str:
        return self._decode_behind([token_id], skips_special=False)

    def _token_bytes(self, token_id: int) -> bytes:
        return self._bytes_of(token_id)

    @cached_property
    def _bytes_of(self) -> TokenBytes:
        return TokenBytes(self._backend)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt that the model's chat template makes of messages, and of other ``values`` that
        it reads by name, ready for the answer."""
        if self._chat is None:
            raise ModelError(
                "A chat was given.",
                "The model has no chat template.",
                'Give the rows as {"prompt": "..."}, or use an instruction-tuned model.',
            )
        return self._chat.render(messages, values or {})

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a chat. The template writes BOS itself, so none is added here."""
        rendered = self.render_chat(messages)
        ids: list[int] = self._backend.encode(rendered, add_special_tokens=False).ids
        return ids

    def _find_prefix(self, named: Mapping[str, str]) -> int | None:
        for name in ("bos_token", "eos_token"):
            found: int | None = self._backend.token_to_id(named.get(name, ""))
            if found is not None:
                return found
        return min(self.eos_token_ids, default=None)

    def _find_eos(self, eos_token: str | None) -> frozenset[int]:
        config = _read_json(self._model_dir / "config.json")
        sources = (
            _read_json(self._model_dir / "generation_config.json"),
            config,
            config.get("text_config"),
        )
        for source in sources:
            value = source.get("eos_token_id") if isinstance(source, dict) else None
            ids = value if isinstance(value, list) else [value]
            found = frozenset(id_ for id_ in ids if isinstance(id_, int) and id_ >= 0)
            if found:
                return found
        eos = None if eos_token is None else self._backend.token_to_id(eos_token)
        return frozenset() if eos is None else frozenset((eos,))


class Detokenizer:
    """The growing text of one row, watched for stop strings.

    Only the last few tokens are decoded at each step: those since ``_start``, which lies one step
    before the first token whose text is not settled (``_settled``). Text that ends in U+FFFD may
    be half a character, so it waits for the next token. Decoding from ``_start`` rather than from
    the new token alone keeps the spaces that decoders put between tokens.

    Without stop strings nothing is decoded until ``text`` is asked for. A stop string that is
    complete after ``min_tokens`` tokens or fewer ends nothing, then or later.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._min_tokens = min_tokens
        self._open_from = 0  # characters up to here end no stop string
        self.stop_string: str | None = None  # the one that was found
        self._overlap = max((len(text) for text in stop), default=1) - 1
        self._ids: list[int] = []
        self._pieces: list[str] = []  # settled text
        self._num_chars = 0  # in the pieces
        self._tail = ""  # the last _overlap characters of it, where a stop string may begin
        self._start = 0
        self._settled = 0
        self._start_text = ""  # of the tokens from _start to _settled
        self._final: str | None = None

    @property
    def text(self) -> str:
        """The text so far, cut before the stop string if there was one."""
        return self._tokenizer.decode_answer(self._ids) if self._final is None else self._final

    def append(self, token_id: int) -> bool:
        """Take one more token; True when a stop string has just been completed."""
        if self._final is not None:
            return False
        self._ids.append(token_id)
        if not self._stop:
            return False
        decoded = self._tokenizer.decode_answer(self._ids[self._start :])
        new = decoded[len(self._start_text) :]
        found = self._find_stop(new)
        if found is not None:
            self._final, self.stop_string = found
            return True
        held = len(self._ids) - self._settled
        if (new and not new.endswith(_BROKEN)) or held >= _MOST_HELD_TOKENS:
            self._settle(new)
        return False

    def _find_stop(self, new: str) -> tuple[str, str] | None:
        """The text before the first stop string, if one ends in ``new``, and that string."""
        begin = self._num_chars - len(self._tail)
        window = self._tail + new.rstrip(_BROKEN)
        if len(self._ids) <= self._min_tokens:
            self._open_from = begin + len(window)
            return None
        places = []
        for text in self._stop:
            least = max(0, self._open_from - len(text) + 1 - begin)
            if (place := window.find(text, least)) >= 0:
                places.append((place, text))
        if not places:
            return None
        place, text = min(places, key=lambda found: found[0])
        return "".join(self._pieces)[:begin] + window[:place], text

    def _settle(self, new: str) -> None:
        self._pieces.append(new)
        self._num_chars += len(new)
        if self._overlap:
            self._tail = (self._tail + new)[-self._overlap :]
        self._start, self._settled = self._settled, len(self._ids)
        self._start_text = self._tokenizer.decode_answer(self._ids[self._start :])


def has_tokenizer(model_dir: Path) -> bool:
    """Whether a directory holds tokenizer files at all; one with a config alone does not."""
    return any((model_dir / name).is_file() for name in ("tokenizer.json", *_OLDER_FILES))


def open_tokenizer(model_dir: Path, *, is_structured: bool = False) -> Tokenizer | None:
    """The tokenizer of a directory, if it has one; with its guides where answers need them, which
    take memory."""
    if not has_tokenizer(model_dir):
        return None
    tokenizer = Tokenizer(model_dir)
    if is_structured:
        _ = tokenizer.guides
    return tokenizer


def _load_backend(model_dir: Path) -> tokenizers.Tokenizer:
    path = model_dir / "tokenizer.json"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(
                f"The tokenizer {path} was opened.",
                f"It cannot be read: {error}.",
                "Download the model again.",
            ) from error
    return _convert_older_format(model_dir)


def _convert_older_format(model_dir: Path) -> tokenizers.Tokenizer:
    present = [name for name in _OLDER_FILES if (model_dir / name).is_file()]
    if not present:
        raise ModelError(
            f"The tokenizer of {model_dir} was asked for.",
            "There is no tokenizer.json and no older tokenizer file.",
            "Download the model's tokenizer files into that directory.",
        )
    try:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        return loaded.backend_tokenizer
    except Exception as error:  # whatever the conversion stumbles over
        raise ModelError(
            f"The tokenizer of {model_dir} was asked for.",
            f"There is no tokenizer.json, and {present[0]} cannot be converted: {error}.",
            "Save it once with transformers' save_pretrained on a machine that has the converter.",
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(
            f"The file {path} was read.", f"It is damaged: {error}.", "Download the model again."
        ) from error
    return content if isinstance(content, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like, as templates name them: plain strings or {"content": ...}."""
    named: dict[str, str] = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            named[key] = text
    return named
