"""A recipe's fingerprint tells apart what gives other tokens, and nothing else."""

from __future__ import annotations

from attrs import evolve
from tokenizers import Tokenizer, models

from forge.data import ByteTokenizer, JsonTokenizer
from forge.data.recipe import Recipe

RECIPE = Recipe("text", ByteTokenizer(), 0.1)


def test_every_setting_but_the_path_counts():
    others = [
        evolve(RECIPE, eval_fraction=0.2),
        evolve(RECIPE, text_key="body"),
        evolve(RECIPE, raw_dtype="uint32"),
        evolve(RECIPE, shard_tokens=7),
    ]
    assert len({recipe.digest() for recipe in [RECIPE, *others]}) == 5
    assert evolve(RECIPE, path="./text").digest() == RECIPE.digest()


def test_a_tokenizer_counts_by_its_content(tmp_path):
    digests = []
    for words in ({"[UNK]": 0, "a": 1}, {"[UNK]": 0, "a": 2}, {"[UNK]": 0, "a": 2}):
        inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        inner.add_special_tokens(["</s>"])
        inner.save(str(tmp_path / "t.json"))
        digests.append(evolve(RECIPE, tokenizer=JsonTokenizer(tmp_path / "t.json")).digest())
    assert digests[0] != digests[1] == digests[2]
