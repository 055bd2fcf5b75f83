"""Dropout's random words: the published Philox4x32-10, and the same whatever tile asks for them."""

from __future__ import annotations

import numpy as np
import torch

from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.tiled.tiles import keep_mask, keep_scale, make_key, philox4x32
from reference import keep_mask_reference, philox4x32_10
from tables import each

torch.set_num_threads(1)

# Random123's kat_vectors: counter, key, output of philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def scalar(value: int) -> torch.Tensor:
    """An int64 scalar with the bits of ``value`` modulo 2**64."""
    value %= 2**64
    return torch.tensor(value - 2**64 if value >= 2**63 else value, dtype=torch.int64)


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@each("counter, key, expected", KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    """Ours, and the reference's."""
    low, high = words(key)
    out = philox4x32(make_key(scalar(high << 32 | low), None), *map(scalar, words(counter)))
    assert [int(word) for word in out] == words(expected)
    reference = philox4x32_10(high << 32 | low, [np.array([word]) for word in words(counter)])
    assert reference[:, 0].tolist() == words(expected)


@each("kv_offset", [0, 1, 2, 3, 6])
def test_keep_mask_matches_the_reference(kv_offset: int) -> None:
    seed, offset = scalar(0xDEADBEEF12345678), scalar(77)
    spec = Spec(dropout_p=0.3, q_offset=5, kv_offset=kv_offset)
    none = torch.empty(0)
    inputs = Inputs(none, none, none, dropout_seed=seed, dropout_offset=offset)
    kept = keep_mask(
        make_key(seed, offset), 0.3, range(2, 4), range(1, 3), range(5, 9), range(kv_offset, kv_offset + 11)
    )
    for n, sequence in enumerate((2, 3)):
        expected = torch.from_numpy(keep_mask_reference(spec, inputs, sequence, 3, 4, 11))
        assert torch.equal(kept[n], expected[1:3])


def test_any_tile_sees_its_part_of_the_whole_mask() -> None:
    key = make_key(scalar(1), scalar(2))
    whole = keep_mask(key, 0.5, range(3), range(4), range(10), range(21))
    tile = keep_mask(key, 0.5, range(1, 3), range(2, 4), range(4, 9), range(7, 18))
    assert torch.equal(tile, whole[1:3, 2:4, 4:9, 7:18])


def test_entry_whose_word_equals_the_threshold_is_kept() -> None:
    key = make_key(scalar(4), None)
    word = int(philox4x32(key, *[scalar(0)] * 4)[0])
    for p, kept in ((word / 2**32, True), ((word + 1) / 2**32, False)):
        assert keep_mask(key, p, range(1), range(1), range(1), range(1)).item() is kept

    assert keep_scale(0.75) == 4.0
    assert keep_scale(1.0) == 0.0  # finite when none is kept
