"""The header of a GGUF file against the gguf package's reader; any damage is refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.errors import ModelError
from freight.model.config import parse_config
from freight.model.gguf import read_gguf
from freight.model.gguf_config import config_of_gguf
from freight.model.gguf_tensors import gguf_tensors
from freight.runtime.gguf_tokenizer import tokenizer_config_of_gguf, tokenizer_of_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["a", "b", "ab", "日本"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_bool("general.flag", True)
    writer.add_float64("general.number", 0.5)
    writer.add_array("general.numbers", [1, 2, 3])
    shapes = {"token_embd.weight": (4, 32), "blk.0.attn_q.weight": (32, 32)}
    for name, shape in shapes.items():
        x = np.linspace(-1, 1, shape[0] * shape[1], dtype=np.float32).reshape(shape)
        kind = gguf.GGMLQuantizationType.Q8_0
        raw = gguf.quants.quantize(x, kind)
        writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_header_is_that_of_the_package(path: Path) -> None:
    theirs = gguf.GGUFReader(str(path))
    own = read_gguf(path, with_arrays=True)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert own.metadata[key] == field.contents(), key
    assert own.metadata["tokenizer.ggml.tokens"] == ["a", "b", "ab", "日本"]
    for tensor in theirs.tensors:
        found = own.tensors[tensor.name]
        assert (found.offset, found.kind) == (tensor.data_offset, tensor.tensor_type.name)
        assert list(found.shape) == list(reversed(tensor.shape.tolist()))
    short = read_gguf(path)
    assert short.tensors == own.tensors
    assert short.metadata["tokenizer.ggml.tokens"] is None
    assert short.metadata["llama.block_count"] == 1


@settings(deadline=None, max_examples=300)
@given(
    place=st.floats(0, 1),
    values=st.binary(min_size=1, max_size=9),
    end=st.floats(0.0, 1.0) | st.none(),
    with_arrays=st.booleans(),
)
def test_damage_is_refused_or_harmless(
    path: Path, place: float, values: bytes, end: float | None, with_arrays: bool
) -> None:
    content = bytearray(path.read_bytes())
    header = len(content) - 4 * 34 - 32 * 34
    begin = int(place * header)
    content[begin : begin + len(values)] = values
    damaged = path.with_name("damaged.gguf")
    damaged.write_bytes(content if end is None else content[: int(end * len(content))])
    try:
        file = read_gguf(damaged, with_arrays=with_arrays)
        gguf_tensors(file)
        if with_arrays:
            tokenizer_of_gguf(file)
            tokenizer_config_of_gguf(file)
        parse_config(config_of_gguf(file))
    except ModelError as error:
        assert error.limit and error.advice
