"""The Python API: a model, and rows through it.

    with LLM("meta-llama/Llama-3.1-8B", cpu_memory="16GiB", weights=(20, 30, 50)) as llm:
        for row in llm.generate(prompts, SamplingParams(max_tokens=64)):
            print(row.index, row.text)

A call is a job without a journal: the same spool, the same checks, the same seeds per row, the same
plans from this machine's profile. Knows no model code; torch is imported when the first row runs.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from freight.entrypoints.compress import compress_ahead
from freight.entrypoints.idle_threads import wait_briefly
from freight.entrypoints.llm_answers import Answers
from freight.entrypoints.llm_rows import (
    Params,
    Prompt,
    Record,
    as_items,
    as_prompts,
    as_texts,
    chat_record,
    either,
    encode,
    pair_record,
    params_record,
    prompt_record,
    read_item,
    read_params,
    text_record,
)
from freight.entrypoints.llm_settings import read_model, read_settings
from freight.entrypoints.model_source import find_model, open_tokenizer, row_limits
from freight.entrypoints.own_machine import nominal_s, own_machine
from freight.errors import InputError
from freight.jobs.formats import RowLimits
from freight.jobs.readings import (
    READING,
    Classification,
    Embedding,
    Form,
    Reading,
    read_completion,
)
from freight.jobs.spool import Spool
from freight.jobs.spool_writer import SpoolWriter
from freight.model.config import read_config
from freight.model.number_format import GROUP_SIZE
from freight.model.task import for_task, refuse_other
from freight.runtime.failures import demand_numbers, refuse_where_all_fail
from freight.runtime.request import Completion
from freight.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from freight.runtime.kept_weights import WeightKeeper

__all__ = ["LLM"]

_LOG: Final = logging.getLogger("freight")

_MOST_ERRORS: Final = 3

Pair = tuple[str, str] | tuple[Sequence[int], Sequence[int]]
Message = Mapping[str, Any]


class LLM:
    """A model on this machine. Each call of ``generate``, ``chat``, ``loglikelihood``, ``embed`` or
    ``classify`` plans for its own rows.

    ``model`` is a directory, a GGUF file, a Hugging Face Hub id, or "demo"; ``lora`` an adapter of
    PEFT's, by directory or id, that is added to its weights; ``task`` "embed" makes embeddings of
    one that generates, and "auto" is what the model's files say. Sizes are "8GiB" or bytes:
    ``cpu_memory`` bounds the whole process, ``gpu_memory`` all that is taken of the device.
    ``weights``, ``kv`` and ``activations`` are percentages on gpu, cpu and disk, as "20/80/0" or
    (20, 80, 0), or on cpu and disk alone, as "40/60" or (40, 60). What is left out is chosen; no
    choice changes the answers. ``cpu_attention`` is the percentage of the rows with KV off the GPU
    that the CPU attends; ``recompute_kv`` that of the layers in which rows elsewhere keep what
    keys and values are made of instead of these. ``admission`` says when rows enter: "row",
    "zigzag", "diagonal", "refill" or "auto"; ``batch_tokens`` bounds what a micro-batch brings to a
    sweep. A row tries up to ``draft_tokens`` at once that followed the same words before (prompt
    lookup). What prompts begin with alike is computed once unless ``share_prefixes`` is off,
    layers with an attention window keep what it reaches alone unless ``roll_windows`` is, and
    rows under way change tiers, as room is left or wanted, unless ``move_rows`` is. ``lossless``
    keeps bfloat16 weights in 11 bits, exactly as they are. Four things do change the answers a
    little: ``weight_bits`` 4 or 8 compresses the matrices, whose groups run along the ``group_dim``
    "input" or "output", ``kv_bits`` keys and values, ``compute`` "int8" makes products of 8-bit
    integers on the CPU, and of the keys that a new token sees only the share ``sparse_attention``
    counts. ``device`` "sim" is a simulated GPU whose link carries ``sim_bandwidth`` per second.
    ``dummy_weights`` asks for random weights from config.json alone.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        lora: str | os.PathLike[str] | None = None,
        task: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        cpu_memory: str | int | None = None,
        gpu_memory: str | int | None = None,
        disk_dir: str | os.PathLike[str] | None = None,
        weights: str | Sequence[float] | None = None,
        kv: str | Sequence[float] | None = None,
        activations: str | Sequence[float] | None = None,
        micro_batch_size: int | None = None,
        num_micro_batches: int | None = None,
        cpu_attention: float | None = None,
        recompute_kv: float | None = None,
        admission: str = "auto",
        batch_tokens: int | None = None,
        draft_tokens: int = 0,
        share_prefixes: bool = True,
        roll_windows: bool = True,
        move_rows: bool = True,
        lossless: bool = False,
        weight_bits: int | None = None,
        kv_bits: int | None = None,
        group_size: int = GROUP_SIZE,
        group_dim: str = "input",
        sparse_attention: float | None = None,
        compute: str = "plain",
        overlap: bool = True,
        sim_bandwidth: str | int | None = None,
        dummy_weights: bool = False,
    ) -> None:
        wait_briefly()  # of effect where torch has not been loaded yet
        settings = {
            "task": task,
            "device": device,
            "dtype": dtype,
            "cpu_memory": cpu_memory,
            "gpu_memory": gpu_memory,
            "disk_dir": disk_dir,
            "weights": weights,
            "kv": kv,
            "activations": activations,
            "micro_batch_size": micro_batch_size,
            "num_micro_batches": num_micro_batches,
            "cpu_attention": cpu_attention,
            "recompute_kv": recompute_kv,
            "admission": admission,
            "batch_tokens": batch_tokens,
            "draft_tokens": draft_tokens,
            "share_prefixes": share_prefixes,
            "roll_windows": roll_windows,
            "move_rows": move_rows,
            "lossless": lossless,
            "weight_bits": weight_bits,
            "kv_bits": kv_bits,
            "group_size": group_size,
            "group_dim": group_dim,
            "sparse_attention": sparse_attention,
            "compute": compute,
            "overlap": overlap,
            "sim_bandwidth": sim_bandwidth,
            "dummy_weights": dummy_weights,
        }
        self._options = read_settings(settings)
        adapter = None if lora is None else read_model(lora, "lora")
        self._model_dir = find_model(read_model(model), adapter)
        self._config = config = for_task(read_config(self._model_dir), self._options.task)
        self._limits = row_limits(config, self._model_dir)
        self._running: weakref.WeakSet[Answers[Any]] = weakref.WeakSet()
        self._keeper: WeightKeeper | None = None
        _OPEN.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the iterators that are not exhausted, and give back what they held, and the weights
        that were kept. The next call loads them again. Such an iterator raises ``InputError`` where
        it is asked for more; so does this, where another thread is taking answers just now."""
        for answers in list(self._running):
            answers.end()
        if self._keeper is not None:
            self._keeper.close()

    @property
    def max_positions(self) -> int:
        """The most tokens that a prompt and its answer may have together."""
        return self._config.max_positions

    @property
    def makes(self) -> str:
        """What the model is run for: "answers", "embeddings" or "scores of labels"."""
        return "answers" if self._config.readout is None else self._config.readout.name

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None where random weights are used without one."""
        return open_tokenizer(self._model_dir, self._options)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params = None,
        *,
        sampling_params: Params = None,
    ) -> Iterator[Completion]:
        """Answers in the order of the prompts, each as soon as it and those before it are done.

        A prompt is text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
        ``params``, or by vLLM's name ``sampling_params``, are for all prompts, each row's seed
        derived of theirs, or one for each prompt; a mapping like {"max_tokens": 64} may stand for
        each.
        The prompts are read to their end here, because the plan depends on how many and how long
        they are; token ids wait in a temporary file. Raises ``InputError`` before anything runs
        if any of them is unusable. The model is loaded when the first answer is asked for, and
        given back when the iterator ends or is closed; but weights in RAM that a CPU computes with
        are kept for the next call until ``close``. A prompt for which the model computes no numbers
        has the ``finish_reason`` "error"; where all have, a ``ModelError`` is raised.
        """
        refuse_other(self._config.readout, "generate", "Answers to prompts were asked for.")
        return self._start(as_prompts(prompts), prompt_record, either(params, sampling_params))

    def chat(
        self,
        messages: Sequence[Message] | Iterable[Sequence[Message]],
        params: Params = None,
        *,
        sampling_params: Params = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Completion]:
        """``generate`` for one conversation or many, written by the model's chat template.

        A message is {"role": ..., "content": ...}. The template is given
        ``chat_template_kwargs``, too, such as {"enable_thinking": False}.
        """
        refuse_other(self._config.readout, "generate", "Answers to chats were asked for.")
        chats = as_items(messages)
        if chats and all(isinstance(message, Mapping) for message in chats):
            chats = [chats]

        def read(chat: Any) -> Record:
            return {**chat_record(chat), "chat_template_kwargs": chat_template_kwargs}

        return self._start(chats, read, either(params, sampling_params))

    def loglikelihood(self, pairs: Iterable[Pair]) -> list[tuple[float, bool]]:
        """Of each (context, continuation) the natural log-probability of the continuation, and
        whether greedy decoding would have made it.

        Both are texts, or both token ids. Texts are cut into tokens as lm-evaluation-harness does:
        spaces that end the context belong to the continuation, both are tokenised together without
        special tokens and cut at the context's own length. In place of an empty context stands the
        token that begins a sequence, else the one that ends it. A pair that is too long for the
        model loses its beginning, and a warning is logged. Raises InputError for pairs that cannot
        be scored; nothing runs then.
        """
        return [(answer.log_likelihood, answer.is_greedy) for answer in self.score(pairs)]

    def score(self, pairs: Iterable[Pair]) -> Iterator[Completion]:
        """``loglikelihood`` of long lists: an answer for each pair, in order, as soon as it and
        those before it are done. It has ``log_likelihood``, ``is_greedy`` and each token's scores
        (``scored``)."""
        refuse_other(self._config.readout, "generate", "Continuations were to be scored.")
        return self._start(as_items(pairs), pair_record, None)

    def embed(
        self, prompts: Prompt | Iterable[Prompt], *, dimensions: int | None = None
    ) -> Iterator[Embedding]:
        """The embedding of each prompt, in order, as soon as it and those before it are done: the
        last token's, behind the last norm, of length 1 unless the model's files say otherwise.

        Prompts are what ``generate`` takes, or chats, as ``chat`` takes them or {"messages":
        [...]}, which the chat template writes without the beginning of an answer. ``dimensions``
        are the first ones alone, for models that were trained to be cut; a prompt that is a mapping
        may say its own. Raises InputError where the model makes no embeddings.
        """
        refuse_other(self._config.readout, "embed", "Embeddings were asked for.")
        return self._read(prompts, Form(dimensions=dimensions))

    def classify(self, prompts: Prompt | Iterable[Prompt]) -> Iterator[Classification]:
        """What a model with labels says of each prompt, likewise; a reward model's ``score``."""
        refuse_other(self._config.readout, "classify", "Scores of labels were asked for.")
        return self._read(prompts, Form())

    def _read(self, prompts: Prompt | Iterable[Prompt], form: Form) -> Iterator[Any]:
        reading = self._limits.reading
        assert reading is not None, "the model generates"
        form.check(reading.size)
        reading = replace(reading, form=form.stated(reading.readout, reading.size))

        def made(spool: Spool, completion: Completion) -> Embedding | Classification:
            demand_numbers(completion, f"Prompt {completion.index}")
            own = spool.form(completion.index) or reading.form
            return read_completion(completion, reading.readout, own)

        return self._start(as_texts(prompts), text_record, READING, reading, made)

    def _start(
        self,
        items: list[Any],
        read: Callable[[Any], Record],
        params: Params,
        reading: Reading | None = None,
        made: Callable[[Spool, Completion], Any] = lambda _, completion: completion,
    ) -> Iterator[Any]:
        if not items:
            return iter(())
        spool = self._spool(items, read, params, replace(self._limits, reading=reading))
        generator = self._answer(spool)
        weakref.finalize(generator, spool.close)
        answers = Answers(generator, len(items), partial(made, spool))
        self._running.add(answers)
        return answers

    def _spool(
        self,
        items: list[Any],
        read: Callable[[Any], Record],
        params: Params,
        limits: RowLimits,
    ) -> Spool:
        """Every row checked and tokenised. Its files live on without a name while it is open."""
        defaults, own = read_params(params, len(items))
        with tempfile.TemporaryDirectory(prefix="freight-") as name:
            directory = Path(name)
            with SpoolWriter(
                directory, tokenizer=self.tokenizer, limits=limits, defaults=defaults
            ) as writer:
                for index, (item, row_params) in enumerate(zip(items, own, strict=True)):
                    record = read_item(index, item, read)
                    record |= {} if row_params is None else params_record(row_params)
                    writer.add(f"Prompt {index}", encode(index, record))
                writer.flush()
                for remark in writer.remarks():
                    _LOG.warning(remark)
            spool = Spool(directory, defaults=defaults, input_hash="")
        _refuse_failed(spool)
        return spool

    def _answer(self, spool: Spool) -> Generator[Completion]:
        try:
            yield from self._run(spool)
        finally:
            # An engine refers to itself, and its memory is wanted for the next one.
            gc.collect()

    def _run(self, spool: Spool) -> Generator[Completion]:
        _refuse_forked()
        # These import torch, which takes seconds.
        from freight.runtime.engine import build_engine
        from freight.runtime.kept_weights import WeightKeeper

        order = spool.order()
        waiting: dict[int, Completion] = {}
        next_index = 0
        workload = spool.workload(order)
        compress_ahead(self._options, self._model_dir, _LOG.info)
        work_s = nominal_s(self._config, workload)
        machine = own_machine(self._options, self._model_dir, work_s, _LOG.info)
        options = replace(self._options, machine=machine)
        self._keeper = self._keeper or WeightKeeper()
        engine = build_engine(
            self._model_dir,
            options=options,
            workload=workload,
            say=_LOG.info,
            keeper=self._keeper,
        )
        with closing(engine):
            requests = (spool.request(int(index)) for index in order)
            for completion in refuse_where_all_fail(engine.run(requests)):
                waiting[completion.index] = completion
                while next_index in waiting:
                    yield waiting.pop(next_index)
                    next_index += 1


_RUN_IN: Final[set[int]] = set()
"""Processes in which something has been computed: this one, or one that it was copied from."""


def _refuse_forked() -> None:
    """Threads of torch do not live on in a copy of a process, and it would wait for them."""
    if _RUN_IN - {os.getpid()}:
        raise InputError(
            "Answers were asked for in a process that was forked.",
            "Its parent had computed before, and the threads that it did so with are not here.",
            'Start it with multiprocessing.get_context("spawn"), or fork before the first answer.',
        )
    _RUN_IN.add(os.getpid())


_OPEN: Final[weakref.WeakSet[LLM]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """What iterators hold is given back while there are modules to do it with."""
    for llm in list(_OPEN):
        with suppress(InputError):
            llm.close()


def _refuse_failed(spool: Spool) -> None:
    failed = spool.failed()
    if not len(failed):
        return
    reasons = [spool.row_error(int(index)) or "" for index in failed[:_MOST_ERRORS]]
    spool.close()
    raise InputError(
        f"{spool.num_rows} prompts were given.",
        f"{len(failed)} cannot be used. {' '.join(reasons)}",
        "Leave such prompts out, or run them as a file, where each becomes an output row.",
    )
