"""Output rows in the shape that OpenAI's batch API gives them.

All of a row follows from its input and its answer, so times are 0 and names are made of the row's
place in the dataset: the same job gives the same file. Knows no files and no parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from freight.jobs.api_names import Batch
from freight.jobs.formats import RowId, dump_row, logprob_record, prompt_logprobs_record
from freight.jobs.readings import Form, Reading, read_completion, reading_record
from freight.runtime.request import Completion, CompletionOutput, Logprob

__all__ = ["batch_error_row", "batch_reading_row", "batch_row"]

Record = dict[str, Any]


def batch_row(custom_id: str, batch: Batch, completion: Completion) -> bytes:
    """The line of an answer, without its newline."""
    shape = _SHAPES[batch["kind"]]
    body = {
        "id": f"{shape.prefix}-{completion.index}",
        "object": shape.name,
        "created": 0,
        "model": batch["model"],
        "choices": [
            {"index": index, **shape.choice(output), "finish_reason": output.finish_reason}
            for index, output in enumerate(completion.outputs)
        ],
        "usage": _usage(completion),
    }
    if completion.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs_record(completion.prompt_logprobs)
    return _response(completion, custom_id, body)


def batch_reading_row(
    custom_id: str, batch: Batch, completion: Completion, reading: Reading, form: Form
) -> bytes:
    """The line of an embedding, in the shape of OpenAI's API, or of scores of labels likewise."""
    own = reading_record(read_completion(completion, reading.readout, form), form, is_named=False)
    shape: Record = {"object": "embedding"}
    if reading.readout.labels:
        shape = {"num_classes": len(reading.readout.labels)}
    body = {
        "object": "list",
        "data": [{"index": 0, **shape, **own}],
        "model": batch["model"],
        "usage": {
            "prompt_tokens": completion.num_prompt_tokens,
            "total_tokens": completion.num_prompt_tokens,
        },
    }
    return _response(completion, custom_id, body)


def batch_error_row(
    index: int, custom_id: RowId | None, message: str, *, code: str = "invalid_request"
) -> bytes:
    """The line of a request that could not be used, without its newline. One that could not be
    read is nameless."""
    error = {"code": code, "message": message}
    return _envelope(str(index), custom_id, response=None, error=error)


def _response(completion: Completion, custom_id: str, body: Record) -> bytes:
    name = str(completion.index)
    response = {"status_code": 200, "request_id": name, "body": body}
    return _envelope(name, custom_id, response=response, error=None)


def _envelope(name: str, custom_id: RowId | None, **rest: Any) -> bytes:
    return dump_row({"id": f"batch_req_{name}", "custom_id": custom_id, **rest})


def _usage(completion: Completion) -> Record:
    prompt, new = completion.num_prompt_tokens, completion.num_new_tokens
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _chat_choice(output: CompletionOutput) -> Record:
    logprobs = None if output.logprobs is None else {"content": [*map(_content, output.logprobs)]}
    return {"message": {"role": "assistant", "content": output.text}, "logprobs": logprobs}


def _content(item: Logprob) -> Record:
    """With the bytes of each token, as OpenAI has it: a character may be several tokens'."""
    record = logprob_record(item)
    record["bytes"] = [*item.raw]
    for other, own in zip(record["top_logprobs"], item.top, strict=True):
        other["bytes"] = [*own.raw]
    return record


def _text_choice(output: CompletionOutput) -> Record:
    return {"text": output.text, "logprobs": _columns(output)}


def _columns(output: CompletionOutput) -> Record | None:
    """The older shape, of completions: a list of each thing, not a thing for each token."""
    if output.logprobs is None:
        return None
    tokens = [logprob_record(item) for item in output.logprobs]
    texts = [token["token"] for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [_by_text([*token["top_logprobs"], token]) for token in tokens],
        "text_offset": [*accumulate(map(len, texts[:-1]), initial=0)] if texts else [],
    }


def _by_text(tokens: Sequence[Record]) -> Record:
    """The likeliest, and the token itself where it is none of them; of parts of characters, which
    are one text, the first."""
    found: Record = {}
    for token in tokens:
        found.setdefault(token["token"], token["logprob"])
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    name: str
    prefix: str
    choice: Callable[[CompletionOutput], Record]


_SHAPES: Final[Mapping[str, _Shape]] = {
    "chat": _Shape(name="chat.completion", prefix="chatcmpl", choice=_chat_choice),
    "text": _Shape(name="text_completion", prefix="cmpl", choice=_text_choice),
}
