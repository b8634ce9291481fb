"""What is said of keys that a checkpoint does not have leads to what has to be changed."""

from __future__ import annotations

import time

import pytest

from robust_dcp.plan.loading.missing_keys import near_names, renamed_in_words, what_is_saved

NAMES = [f"layers.{n}.attention.{part}.weight" for n in range(12) for part in ("query", "key", "value")]


def _renamed(asked: list[str], saved: list[str]) -> str:
    return renamed_in_words(sorted(set(asked) - set(saved)), asked, saved)


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.", "ema.shadow.", "a.b.c."])
def test_a_prefix_on_one_side_only_is_named(prefix: str) -> None:
    longer = [prefix + name for name in NAMES]
    here, there = _renamed(longer, NAMES), _renamed(NAMES, longer)
    assert here.startswith(f"all 36 missing keys are there without {prefix!r}")
    assert there.startswith(f"all 36 missing keys are there with {prefix!r}")


def test_a_wrapper_is_named_wherever_it_stands_in_a_name() -> None:
    compiled = [name.replace("attention", "_orig_mod.attention") for name in NAMES]
    assert "without '_orig_mod.' (torch.compile" in _renamed(compiled, NAMES)
    assert "with '_orig_mod.' (torch.compile" in _renamed(NAMES, compiled)
    both = _renamed([f"module.{name}" for name in NAMES], [f"_orig_mod.{name}" for name in NAMES])
    assert "without 'module.' and with '_orig_mod.'" in both


def test_another_prefix_on_either_side_is_named() -> None:
    words = _renamed([f"ema.{name}" for name in NAMES], [f"model.{name}" for name in NAMES])
    assert words == "all 36 missing keys are there with 'model.' in place of 'ema.'"


def test_how_many_keys_a_prefix_explains_is_said() -> None:
    assert "36 of the 37 missing" in _renamed([*(f"model.{name}" for name in NAMES), "model.new"], NAMES)


@pytest.mark.parametrize(
    ("asked", "saved"),
    [
        ([*NAMES, "layers.12.attention.key.weight"], NAMES),  # one layer more: nothing is renamed
        (["b.w", "w"], ["w"]),  # what "b.w" might have been is asked for itself
        (["a.weight"], ["b.weight"]),
        (["entirely", "other.names"], NAMES),
        (["w"], []),
        (NAMES, NAMES),
    ],
)
def test_no_prefix_is_claimed_where_none_explains_the_keys(asked: list[str], saved: list[str]) -> None:
    assert _renamed(asked, saved) == ""


def test_a_misspelt_name_is_offered_the_one_that_is_there() -> None:
    for misspelt, name in [
        ("layers.3.attention.kye.weight", "layers.3.attention.key.weight"),
        ("layers.3.attention.key.wieght", "layers.3.attention.key.weight"),
        ("layer.3.attention.key.weight", "layers.3.attention.key.weight"),
        ("layers.3.self.attention.key.weight", "layers.3.attention.key.weight"),
        ("layers.3.key.weight", "layers.3.attention.key.weight"),
    ]:
        assert near_names([misspelt], [misspelt], NAMES).get(misspelt) == name, misspelt


@pytest.mark.parametrize(
    ("key", "saved"),
    [
        ("layers.12.attention.key.weight", NAMES),  # a number is no misspelling
        ("layers.3.mlp.key.weight", NAMES),
        ("b.w", ["w"]),
        ("own0", ["own1"]),
        ("w", ["v"]),
        ("nothing.like.it", NAMES),
        ("w", []),
    ],
)
def test_what_is_only_a_little_alike_is_not_offered(key: str, saved: list[str]) -> None:
    assert near_names([key], [key], saved) == {}


def test_a_name_that_nobody_asks_for_is_offered_first() -> None:
    assert near_names(["biass"], ["biass", "bias"], ["bias", "biases"]) == {"biass": "biases"}


def test_the_checkpoints_own_keys_are_counted_with_examples() -> None:
    assert what_is_saved(["a"], ["a", "b"]) == "the checkpoint has 2 keys, 1 of them not asked for: 'b'"
    assert what_is_saved(["a"], ["a"]) == "the checkpoint has 1 key: 'a'"
    assert what_is_saved(["a"], []) == "the checkpoint has 0 keys: "
    text = what_is_saved([], NAMES)
    assert "36 keys" in text and text.count("'layers.") == 4 and text.endswith(", …")


def test_a_hundred_thousand_keys_are_compared_in_seconds() -> None:
    saved = [f"model.layers.{n // 10}.attention.linear_{n % 10}.weight" for n in range(100_000)]
    began = time.process_time()
    for asked in ([f"ema.{name[6:]}" for name in saved], [f"other.{name[::-1]}" for name in saved]):
        missing = sorted(asked)
        renamed_in_words(missing, asked, saved)
        near_names(missing[:10], asked, saved)
        what_is_saved(asked, saved)
    assert time.process_time() - began < 30  # 4 s; comparing each with each would take an hour
