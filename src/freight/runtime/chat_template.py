"""A model's chat template: messages to the prompt it was trained on.

Renders as transformers does (same sandbox, same filters), so that prompts agree to the byte. Knows
no token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freight.errors import InputError, ModelError

if TYPE_CHECKING:
    import jinja2

__all__ = ["ChatTemplate", "read_chat_template"]


class ChatTemplate:
    """One template with the special tokens that it may name; compiled when first used."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

    @cached_property
    def _template(self) -> jinja2.Template:
        return _compile(self.source)

    def render(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        """The prompt up to where the answer begins, unless ``values`` say otherwise by
        ``add_generation_prompt``. Keys that are null count as absent. Of ``values`` a template
        reads what it knows; they go before special tokens."""
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        template = self._template
        try:
            return template.render(
                messages=given,
                tools=None,
                documents=None,
                **{"add_generation_prompt": True, **self._special_tokens, **values},
            )
        except Exception as error:  # a template is a programme: it can fail in any way
            raise InputError(
                "Messages were given to the model's chat template.",
                f"It refuses them: {error}.",
                'Give each message a "role" and a "content" that the model knows.',
            ) from error


def read_chat_template(
    model_dir: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The default template: chat_template.jinja, else tokenizer_config.json's, else none."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate(path.read_text(encoding="utf-8"), special_tokens)
    given = tokenizer_config.get("chat_template")
    if isinstance(given, list):
        given = {entry.get("name"): entry.get("template") for entry in given}.get("default")
    return ChatTemplate(given, special_tokens) if isinstance(given, str) else None


def _compile(source: str) -> jinja2.Template:
    # jinja2 takes longer to import than tokenizers, and jobs without chats never need it.
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_generation_tag(), jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelError(
            "The model's chat template was read.",
            f"It is not a usable template: {error}.",
            "Download the model's tokenizer files again.",
        ) from error


def _generation_tag() -> type[Any]:
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser

    class GenerationTag(jinja2.ext.Extension):
        """``{% generation %}`` marks the assistant's tokens for training: plain text here."""

        tags = {"generation"}  # noqa: RUF012, the name and the type are jinja2's

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
