"""The letters of a model's dims, and how large each is.

D model width, E width of the embedding, F of an MLP, N query heads, K key/value heads, H their
width, U that of values where it is another, k and h heads and width of layers where these are
others, n query heads of these, V vocabulary, y labels, P positions; p inputs that a layer has of
its own, i those of all layers, w width of the MLP of layers that attend the keys of others; X
experts, e of them that a token takes, Y width of one, Z of the MLP beside them, L of what they work
on where that is narrow; s residual streams, m mappings that are made of them before a block, in c
parts. Those of latents and of what rows keep beside these: no letter means two things.
"""

from __future__ import annotations

from collections.abc import Mapping

from freight.model.kept_steps import kept_sizes
from freight.model.latent_steps import latent_sizes
from freight.model.layer_kinds import CompressedKeys, KeptLatents
from freight.model.recurrent_layers import recurrent_sizes
from freight.model.switches import ModelConfig

__all__ = ["dim_sizes"]


def dim_sizes(config: ModelConfig) -> dict[str, int]:
    """All that the model has."""
    plain = {
        "D": config.hidden_size,
        "E": config.embedding_size,
        "F": config.intermediate_size,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "H": config.projected_width,
        "V": config.vocab_size,
        "P": config.max_positions + config.position_offset,
        "S": config.num_heads + 2 * config.num_kv_heads,
        "X": config.experts.num_experts if config.experts else 0,
        "Y": config.experts.intermediate_size if config.experts else 0,
        "Z": config.experts.shared_size if config.experts else 0,
        "L": config.experts.latent_size if config.experts else 0,
        "e": config.experts.per_token if config.experts else 0,
        "1": 1,
        "2": 2,
    }
    parts: list[Mapping[str, int]] = [plain]
    if (latent := config.latent) is not None:
        widths = (latent.rank, latent.key_width, latent.value_width, latent.query_rank)
        parts.append(latent_sizes(config.head_dim, *widths))
    if (own := config.other_heads) is not None:
        parts.append({"n": own.num_heads, "k": own.num_kv_heads, "h": own.head_dim})
    if config.value_width is not None:
        parts.append({"U": config.value_width})
    if config.layer_inputs is not None:
        parts.append({"p": config.layer_inputs, "i": config.input_columns})
    if config.sharing is not None:
        parts.append({"w": config.sharing.mlp_size})
    if (streams := config.streams) is not None:
        own_parts = 2 + (streams.rounds > 0)
        mapped = streams.count + streams.share_columns
        parts.append({"s": streams.count, "m": mapped, "c": own_parts})
    if config.readout is not None:
        parts.append({"y": len(config.readout.labels)})
    if isinstance(config.recurrence, KeptLatents):
        index = config.recurrence.index
        parts.append({"l": index.num_heads, "t": index.width})
    elif isinstance(config.recurrence, CompressedKeys):
        parts.append(kept_sizes(config.recurrence, config.num_heads))
    elif config.recurrence is not None:
        parts.append(recurrent_sizes(config.recurrence))
    sizes = {letter: size for part in parts for letter, size in part.items()}
    assert len(sizes) == sum(map(len, parts)), "a letter means two things"
    return sizes
