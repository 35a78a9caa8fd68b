"""A tokenizer.json out of what a GGUF file says of its tokenizer.

Of a byte-level BPE it is put together here: how text is split before merges is only named there,
and the names that are known here are those of the models that are run. Of a vocabulary of
SentencePiece transformers makes it, where that is installed. Knows JSON and metadata, no rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from freight.errors import ModelError
from freight.model.gguf import GgufFile

__all__ = ["absence_of_tokenizer", "tokenizer_config_of_gguf", "tokenizer_of_gguf"]

_OF_BYTES: Final = "gpt2"
"""What llama.cpp calls a tokenizer that joins pairs of bytes."""
_LLAMA: Final = "llama"
_OF_PIECES: Final = (_LLAMA, "gemma4")
"""Those whose pieces are text, with a mark for the space before a word."""
_SPACE: Final = "\u2581"

_CONTROL: Final = 3
_USER_DEFINED: Final = 4

# The patterns of the models' own tokenizer.json files.
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}|"
    r" ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_3: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_3_FIRST: Final = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Splitting:
    """``pattern`` None: GPT-2's; those of ``before`` have cut a text first. ``whole_words``: one
    that is a token is not merged. ``adds_start`` where the file does not say so itself."""

    pattern: str | None = None
    before: tuple[str, ...] = ()
    digits: bool = False
    composed: bool = False
    whole_words: bool = False
    adds_start: bool = False


_OF_GPT2: Final = _Splitting()
_OF_DIGITS: Final = _Splitting(digits=True)
_OF_LLAMA3: Final = _Splitting(pattern=_LLAMA3, whole_words=True, adds_start=True)
_OF_CL100K: Final = _Splitting(pattern=_LLAMA3)
_OF_QWEN2: Final = _Splitting(pattern=_QWEN2, composed=True)
_OF_O200K: Final = _Splitting(pattern=_O200K)
_OF_DEEPSEEK_3: Final = _Splitting(pattern=_DEEPSEEK_3, before=_DEEPSEEK_3_FIRST)
_SPLITTINGS: Final[Mapping[str, _Splitting]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4", "a.x-4.0", "granite-docling"), _OF_GPT2),
    **dict.fromkeys(("olmo", "mpt", "jais", "trillion"), _OF_GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "mellum2"), _OF_DIGITS),
    "command-r": _Splitting(digits=True, composed=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _OF_LLAMA3),
    **dict.fromkeys(("lfm2", "falcon-h1", "midm-2.0"), _OF_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _OF_CL100K),
    **dict.fromkeys(("glm4", "glm5"), _Splitting(pattern=_LLAMA3, whole_words=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _OF_QWEN2),
    **dict.fromkeys(("hunyuan", "solar-open", "stablelm2"), _Splitting(pattern=_QWEN2)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _OF_DEEPSEEK_3),
    "qwen35": _Splitting(pattern=_QWEN35, composed=True),
    "seed-coder": _Splitting(pattern=_SEED),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _OF_O200K),
    "tekken": _Splitting(pattern=_TEKKEN, whole_words=True, adds_start=True),
}


def tokenizer_of_gguf(file: GgufFile) -> dict[str, Any] | None:
    """The content of a tokenizer.json; None where the file's tokenizer is of a kind that is not
    made here. Raises ModelError where what it says of it is no tokenizer."""
    said = _said(file)
    if said.get("model") in _OF_PIECES:
        return _of_pieces(file, said)
    splitting = _SPLITTINGS.get(str(said.get("pre")))
    tokens, merges = said.get("tokens"), said.get("merges")
    if said.get("model") != _OF_BYTES or splitting is None or not tokens or not merges:
        return None
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, said.get("token_type") or []),
        "normalizer": {"type": "NFC"} if splitting.composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _splitters(splitting)},
        "post_processor": _ends(said, tokens, splitting),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": splitting.whole_words,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def absence_of_tokenizer(file: GgufFile) -> str:
    """Why ``tokenizer_of_gguf`` makes none."""
    said = _said(file)
    kind, pre = said.get("model"), said.get("pre")
    if kind is None or not said.get("tokens"):
        return f"{file.path.name} has no tokenizer."
    if kind in _OF_PIECES:
        return f"The tokenizer of {file.path.name} is made by transformers, which is not installed."
    if kind != _OF_BYTES:
        return f"{file.path.name} has a tokenizer of the kind {kind!r}, which is not known."
    return f"{file.path.name} has a tokenizer that splits text as {pre!r}, which is not known."


def _of_pieces(file: GgufFile, said: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        return None
    try:
        made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            name_or_path=str(file.path.parent), gguf_file=file.path.name, local_files_only=True
        )
        content: dict[str, Any] = json.loads(made.backend_tokenizer.to_str())
        if not said.get("add_space_prefix", True):
            return _without_prefix(content)
        return _with_prefix(content) if said.get("model") == _LLAMA else content
    except Exception as error:  # whatever the conversion stumbles over
        raise ModelError(
            f"The tokenizer of {file.path} was asked for.",
            f"transformers cannot make it of what the file says ({error}).",
            "Put the model's tokenizer.json beside the file.",
        ) from error


def _with_prefix(content: dict[str, Any]) -> dict[str, Any]:
    """The same with a space before each stretch of text, also one that begins with a space or comes
    behind a special token, as llama.cpp and the models' own files have it. transformers puts none
    there."""
    normalizers = [
        {"type": "Prepend", "prepend": _SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
    ]
    normalizer = {"type": "Sequence", "normalizers": normalizers}
    return {**content, "normalizer": normalizer, "pre_tokenizer": None}


def _without_prefix(content: dict[str, Any]) -> dict[str, Any]:
    """The same where no space is put before a text, and none is taken off an answer."""

    def change(own: Any) -> Any:
        if isinstance(own, list):
            return [change(item) for item in own if not _is_prefix(item)]
        if not isinstance(own, dict) or own.get("type") not in ("Sequence", "Metaspace"):
            return own
        if own["type"] == "Metaspace":
            return {**own, "prepend_scheme": "never"}
        return {name: change(value) for name, value in own.items()}

    parts = ("normalizer", "pre_tokenizer", "decoder")
    changed = {name: change(content.get(name)) for name in parts}
    return {**content, **{k: None if _is_prefix(own) else own for k, own in changed.items()}}


def _is_prefix(own: Any) -> bool:
    if not isinstance(own, dict):
        return False
    strips = own.get("type") == "Strip" and own.get("content") == " "
    return own.get("type") == "Prepend" or strips


def tokenizer_config_of_gguf(file: GgufFile) -> dict[str, Any]:
    """The content of a tokenizer_config.json: the chat template and the tokens that it may name."""
    said, found = _said(file), {}
    tokens = said.get("tokens") or []
    for name in ("bos", "eos"):
        number = said.get(f"{name}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            found[f"{name}_token"] = tokens[number]
    template = file.metadata.get("tokenizer.chat_template")
    return found if template is None else {**found, "chat_template": template}


def _said(file: GgufFile) -> Mapping[str, Any]:
    """What the file says under this name. Raises ModelError where lists are of other things."""
    prefix = "tokenizer.ggml."
    said = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    for name, kind in (("tokens", str), ("merges", str), ("token_type", int)):
        value = said.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise ModelError(
                f"The tokenizer of {file.path} was asked for.",
                f"What the file says of its {name} is no list of {kind.__name__}.",
                "Put the model's tokenizer.json and tokenizer_config.json beside the file.",
            )
    return said


def _added(tokens: list[str], kinds: list[int]) -> list[dict[str, Any]]:
    """Tokens that are found in the text before it is split."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": number, "content": token, **plain, "special": kind == _CONTROL}
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _splitters(splitting: _Splitting) -> list[dict[str, Any]]:
    if splitting.pattern is None:
        digits = [{"type": "Digits", "individual_digits": True}] if splitting.digits else []
        return [*digits, _byte_level(use_regex=True)]
    splits = [
        {"type": "Split", "pattern": {"Regex": own}, "behavior": "Isolated", "invert": False}
        for own in (*splitting.before, splitting.pattern)
    ]
    return [*splits, _byte_level(use_regex=False)]


def _ends(said: Mapping[str, Any], tokens: list[str], splitting: _Splitting) -> dict[str, Any]:
    """Special tokens around a prompt."""
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special: dict[str, Any] = {}
    start, end = said.get("bos_token_id"), said.get("eos_token_id")
    for number, is_added, place in (
        (start, said.get("add_bos_token", splitting.adds_start), 0),
        (end, said.get("add_eos_token", False), len(single) + 1),
    ):
        if is_added and isinstance(number, int) and 0 <= number < len(tokens):
            token = tokens[number]
            single.insert(place, {"SpecialToken": {"id": token, "type_id": 0}})
            special[token] = {"id": token, "ids": [number], "tokens": [token]}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": special,
    }
