"""Freight as a model of EleutherAI's lm-evaluation-harness, under the name "freight".

    from freight.entrypoints.harness_model import HarnessModel
    from lm_eval import simple_evaluate

    simple_evaluate(HarnessModel("./model", cpu_memory="16GiB"), tasks=["arc_easy"])

What is evaluated, and by which conventions, is the harness's business: texts are cut into pairs,
windows and prompts as it does for models of transformers. All requests of a kind are one job, for
which weights are brought block by block, so there is no batch size. Knows no tasks and no metrics.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, TypeVar

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from freight.entrypoints.llm import LLM
from freight.errors import InputError
from freight.jobs.spool import derive_seed
from freight.runtime.failures import demand_numbers
from freight.runtime.params import SamplingParams
from freight.runtime.tokenizer import Tokenizer

__all__ = ["HarnessModel"]

Answer = TypeVar("Answer")
Windows = tuple[Sequence[int], Sequence[int]]

_MAX_NEW_TOKENS: Final = 256
_SAMPLING: Final = {own.name for own in fields(SamplingParams)} - {"n", "max_tokens", "stop"}
_OF_NO_EFFECT: Final[Mapping[str, Any]] = {"do_sample": None, "num_beams": 1, "use_cache": None}
"""What tasks may say of how to generate that is so in any case; None stands for any value."""
_MACHINE: Final = frozenset(inspect.signature(LLM.__init__).parameters) - {"self", "model"}


@register_model("freight")
class HarnessModel(TemplateLM):  # type: ignore[misc]
    """``pretrained`` and ``machine`` are what ``LLM`` takes, ``peft`` its ``lora`` by the harness's
    name. ``batch_size`` and ``max_batch_size``
    are taken and left aside: the plan chooses. Rows are cut at ``max_length`` tokens, by default
    the model's positions; a task that does not say how long answers may be gets ``max_gen_toks``.
    Texts get the special tokens that the tokenizer puts around them, BOS among them, or not where
    ``add_bos_token`` is off. Thoughts up to ``think_end_token`` are no part of an answer.
    ``chat_template_args`` and ``enable_thinking`` reach the chat template.

    Raises InputError for what ``LLM`` does not take, and for a model without a tokenizer.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        peft: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = _MAX_NEW_TOKENS,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        **machine: Any,
    ) -> None:
        super().__init__()
        if pretrained is None:
            raise InputError(
                "Tasks were to be evaluated.",
                "No model was named.",
                "Name one with --model_args pretrained=./model.",
            )
        machine = machine if peft is None else {"lora": peft, **machine}
        unknown = [name for name in machine if name not in _MACHINE]
        if unknown:
            raise InputError(
                f"{unknown[0]}={machine[unknown[0]]!r} was given among the model's arguments.",
                f"Beside pretrained there are {', '.join(sorted(_MACHINE))}.",
                "Write it as one of these, or leave it out.",
            )
        self.pretrained = pretrained
        self.llm = LLM(pretrained, device=_device(device), **machine)
        if self.llm.tokenizer is None:
            raise InputError(
                f"The model {pretrained} was to be evaluated.",
                "It has no tokenizer, and tasks are texts.",
                "Put the model's tokenizer files beside it.",
            )
        self._tokenizer: Tokenizer = self.llm.tokenizer
        self.max_length = max_length or self.llm.max_positions
        self.max_gen_toks = max_gen_toks
        self._adds_special = add_bos_token
        self._prefix_id = prefix_token_id
        self._think_end = think_end_token
        self._template_values = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._template_values["enable_thinking"] = enable_thinking

    # -- texts and tokens ----------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        """What cached requests are told apart by."""
        return self.pretrained.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return min(self._tokenizer.eos_token_ids or {self.prefix_token_id})

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it: BOS, else EOS."""
        if (own := self._find_prefix()) is None:
            raise InputError(
                f"A task scores texts from their first token, with {self.pretrained}.",
                "The model has no token that begins or ends a text, to stand before it.",
                "Give prefix_token_id among the model's arguments.",
            )
        return own

    def _find_prefix(self) -> int | None:
        return self._tokenizer.prefix_token_id if self._prefix_id is None else self._prefix_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **ignored: Any
    ) -> list[int]:
        """Token ids of a text. Unless told by ``add_special_tokens`` it gets them as the model's
        arguments say; one that begins with what stands before texts, as those of chats do, gets
        none."""
        is_wanted = add_special_tokens
        if is_wanted is None:
            prefix_id = self._find_prefix()
            begins = None if prefix_id is None else self._tokenizer.token_text(prefix_id)
            is_wanted = self._adds_special is not False
            is_wanted = is_wanted and not (begins and string.startswith(begins))
        [ids] = self._tokenizer.encode_batch([string], add_special_tokens=is_wanted)
        return ids

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The source of the model's chat template, where one is wanted and there is one."""
        return (self._tokenizer.chat_template or "") if chat_template else ""

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a chat; without ``add_generation_prompt`` the last message is the beginning
        of the answer, and the prompt ends where it does."""
        values = {**self._template_values, "add_generation_prompt": add_generation_prompt}
        written = self._tokenizer.render_chat(chat_history, values)
        if add_generation_prompt:
            return written
        last = chat_history[-1]["content"].strip()
        return written[: written.rindex(last) + len(last)]

    # -- scores --------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **ignored: Any,
    ) -> list[tuple[float, bool]]:
        """Of each continuation, and whether greedy decoding would have made it. Rows that are too
        long lose their beginning."""
        found = []
        pairs = [self._fitted(context, own) for _, context, own in requests]
        answers = self.llm.score(pairs)
        for (texts, _, _), answer in zip(
            requests, _watched(answers, len(pairs), "scoring", disable_tqdm), strict=True
        ):
            demand_numbers(answer, f"Request {answer.index}")
            found.append((answer.log_likelihood, answer.is_greedy))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, found[-1])
        return found

    def _fitted(self, context: Sequence[int], continuation: Sequence[int]) -> Windows:
        """The last token is scored and never computed: a row may have one more than fit. All of the
        continuation stays, behind one token at least."""
        room = self.max_length + 1 - len(continuation)
        return context[-max(1, room) :], continuation

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        """Of whole texts, in windows as long as the model's positions in which each token is scored
        once; all windows are one job."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            own = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in own]
            windows += [(None, context, continuation) for context, continuation in pairs]
            counts.append(len(pairs))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        sums = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    # -- answers -------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers up to the first of the texts that end them, all in one job."""
        prompts, params, stops = [], [], []
        for place, (context, wishes) in enumerate(request.args for request in requests):
            prompt, own, stop = self._wanted(context, wishes, place)
            prompts.append(prompt)
            params.append(own)
            stops.append(stop)
        answers = self.llm.generate(prompts, params)
        texts = []
        for request, stop, answer in zip(
            requests,
            stops,
            _watched(answers, len(prompts), "answering", disable_tqdm),
            strict=True,
        ):
            demand_numbers(answer, f"Request {answer.index}")
            texts.append(self._without_thoughts(answer.text, stop))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _wanted(
        self, context: str, wishes: Mapping[str, Any], place: int
    ) -> tuple[list[int], SamplingParams, tuple[str, ...]]:
        """The prompt's tokens, cut at their beginning so that the answer has room; how it is to be
        sampled, by a seed of its ``place``, as tasks may ask for several answers to one prompt; and
        the texts that end it."""
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(dict(wishes), self.max_gen_toks))
        stop = tuple(text for text in kwargs.pop("until") if text)
        max_tokens = kwargs.pop("max_gen_toks")
        own = {name: kwargs.pop(name) for name in _SAMPLING & kwargs.keys()}
        own["seed"] = derive_seed(own.get("seed", 0), place)
        for name, value in kwargs.items():
            if name not in _OF_NO_EFFECT or _OF_NO_EFFECT[name] not in (None, value):
                raise InputError(
                    f"A task asks for answers with {name}={value!r}.",
                    f"Beside until and max_gen_toks there are {', '.join(sorted(_SAMPLING))}.",
                    "Change it with --gen_kwargs, or leave the task out.",
                )
        room = self.max_length - max_tokens
        if room < 1:
            raise InputError(
                f"A task asks for answers of up to {max_tokens} tokens.",
                f"With a prompt they have {self.max_length} positions.",
                "Lower it with --gen_kwargs max_gen_toks=N.",
            )
        # Thoughts may hold what ends an answer.
        ends = () if self._think_end else stop
        params = SamplingParams(max_tokens=max_tokens, stop=ends, **own)
        return self.tok_encode(context)[-room:], params, stop

    def _without_thoughts(self, text: str, stop: Iterable[str]) -> str:
        if self._think_end:
            text = text.rpartition(self._think_end)[2].lstrip()
            for end in stop:
                text = text.partition(end)[0]
        return text


def _device(name: str | None) -> str:
    """As the harness names devices; it asks for CUDA where nobody has asked for anything."""
    return "auto" if name is None or name.startswith("cuda") else name


def _watched(answers: Iterator[Answer], count: int, what: str, is_quiet: bool) -> Iterator[Answer]:
    return iter(tqdm(answers, total=count, desc=f"freight, {what}", disable=is_quiet))
