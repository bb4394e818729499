"""Which parameters are trained: a mask over names, a pure function of the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from forge.config import FreezeStage
from forge.errors import ConfigError, did_you_mean

ALIASES: dict[str, tuple[str, ...]] = {
    "all": ("*",),
    "embeddings": ("embed.*", "position_embed.*"),
    "head": ("head.*",),
    "norms": ("*norm.weight", "*norm.bias"),
    "attention": ("blocks.*.attn.*",),
    "mlp": ("blocks.*.mlp.*",),
    "blocks": ("blocks.*",),
}
"""Short names for patterns over our model's parameters."""


def trainable_mask(stages: Sequence[FreezeStage], names: Iterable[str], step: int) -> dict[str, bool]:
    """Name -> whether it is trained at update `step`: the last stage that has begun and matches decides.

    Raises:
        ConfigError: a pattern matches no name, or nothing is left to train.
    """
    mask = dict.fromkeys(names, True)
    for stage in stages:
        for pattern in stage.patterns:
            matched = _matches(pattern, mask)
            if stage.start_step <= step:
                mask.update(dict.fromkeys(matched, not stage.frozen))
    if not any(mask.values()):
        raise ConfigError(f"train.freeze leaves no parameter to train at step {step}: unfreeze some")
    return mask


def trainable_names(stages: Sequence[FreezeStage], names: Iterable[str], step: int) -> frozenset[str]:
    """The names that are trained at update `step`."""
    return frozenset(name for name, trained in trainable_mask(stages, names, step).items() if trained)


def stage_boundaries(stages: Sequence[FreezeStage]) -> tuple[int, ...]:
    """The updates at which the mask may change, ascending, 0 first."""
    return tuple(sorted({0, *(stage.start_step for stage in stages)}))


def ever_trainable(stages: Sequence[FreezeStage], names: Iterable[str], step: int) -> frozenset[str]:
    """The names trained at some update <= `step`: those that the optimizer state has entries for."""
    names = list(names)
    begun = [start for start in stage_boundaries(stages) if start <= step]
    return frozenset().union(*(trainable_names(stages, names, start) for start in begun))


def _matches(pattern: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    patterns = ALIASES.get(pattern, (pattern,))
    matched = [name for name in names if any(fnmatchcase(name, p) for p in patterns)]
    if not matched:
        known = [word for word in (*ALIASES, *names) if word != pattern]  # an alias may match nothing: a tied head
        raise ConfigError(f"train.freeze: the pattern '{pattern}' matches no parameter{did_you_mean(pattern, known)}")
    return matched
