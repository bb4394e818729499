"""The `scheduler` section: one class a shape of the learning rate; `--scheduler.name` chooses it.

`warmup_steps` left unset is 5 % of `train.steps`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from attrs import field, frozen

from forge.config.checks import integer, number, one_of, optional

_steps = optional(integer(least=0))
_positive_steps = optional(integer(least=1))
_ratio = number(least=0, most=1)


@frozen
class Cosine:
    """Linear warmup, then half a cosine down to min_lr_ratio (Loshchilov & Hutter 2017)."""

    SECTION: ClassVar[str] = "scheduler"

    name: Literal["cosine"] = field(default="cosine", validator=one_of("cosine"))
    """cosine | linear | wsd | constant | rex | none: chooses the schedule and its flags."""
    warmup_steps: int | None = field(default=None, validator=_steps)
    """Updates of linear warmup; unset = 5 % of train.steps."""
    decay_steps: int | None = field(default=None, validator=_positive_steps)
    """Updates of decay after warmup; unset = all that remain."""
    min_lr_ratio: float = field(default=0.1, validator=_ratio)
    """Floor, as a multiple of the peak."""


@frozen
class Linear:
    """Linear warmup, then a straight line down to min_lr_ratio."""

    SECTION: ClassVar[str] = "scheduler"

    name: Literal["linear"] = field(default="linear", validator=one_of("linear"))
    """cosine | linear | wsd | constant | rex | none: chooses the schedule and its flags."""
    warmup_steps: int | None = field(default=None, validator=_steps)
    """Updates of linear warmup; unset = 5 % of train.steps."""
    decay_steps: int | None = field(default=None, validator=_positive_steps)
    """Updates of decay after warmup; unset = all that remain."""
    min_lr_ratio: float = field(default=0.0, validator=_ratio)
    """Floor, as a multiple of the peak."""


@frozen
class WSD:
    """Warmup, stable, decay (Hu et al. 2024; Haegele et al. 2024)."""

    SECTION: ClassVar[str] = "scheduler"

    name: Literal["wsd"] = field(default="wsd", validator=one_of("wsd"))
    """cosine | linear | wsd | constant | rex | none: chooses the schedule and its flags."""
    warmup_steps: int | None = field(default=None, validator=_steps)
    """Updates of linear warmup; unset = 5 % of train.steps."""
    stable_steps: int | None = field(default=None, validator=_steps)
    """Updates at the peak after warmup; unset = all but the last 20 % of train.steps."""
    decay: Literal["cosine", "linear", "sqrt", "one_minus_sqrt"] = field(
        default="one_minus_sqrt", validator=one_of("cosine", "linear", "sqrt", "one_minus_sqrt")
    )
    """Shape of the decay: sqrt is (1-t)^0.5, one_minus_sqrt is 1 - t^0.5."""
    min_lr_ratio: float = field(default=0.0, validator=_ratio)
    """Floor, as a multiple of the peak."""


@frozen
class Constant:
    """Linear warmup, then the peak for ever."""

    SECTION: ClassVar[str] = "scheduler"

    name: Literal["constant"] = field(default="constant", validator=one_of("constant"))
    """cosine | linear | wsd | constant | rex | none: chooses the schedule and its flags."""
    warmup_steps: int | None = field(default=None, validator=_steps)
    """Updates of linear warmup; unset = 5 % of train.steps."""


@frozen
class REX:
    """Linear warmup, then reflected-exponential decay (Chen, Wolfe, Kyrillidis 2021)."""

    SECTION: ClassVar[str] = "scheduler"

    name: Literal["rex"] = field(default="rex", validator=one_of("rex"))
    """cosine | linear | wsd | constant | rex | none: chooses the schedule and its flags."""
    warmup_steps: int | None = field(default=None, validator=_steps)
    """Updates of linear warmup; unset = 5 % of train.steps."""
    decay_steps: int | None = field(default=None, validator=_positive_steps)
    """Updates of decay after warmup; unset = all that remain."""
    alpha: float | None = field(default=None, validator=optional(number(above=0)))
    """Power in max(min_lr_ratio, (1-t)^alpha); unset = the paper's (1-t) / (1 - t/2)."""
    min_lr_ratio: float = field(default=0.0, validator=_ratio)
    """Floor, as a multiple of the peak."""


@frozen
class NoSchedule:
    """The peak at every update."""

    SECTION: ClassVar[str] = "scheduler"

    name: Literal["none"] = field(default="none", validator=one_of("none"))
    """cosine | linear | wsd | constant | rex | none: chooses the schedule and its flags."""


SchedulerConfig = Cosine | Linear | WSD | Constant | REX | NoSchedule
SCHEDULERS: dict[str, type] = {
    "cosine": Cosine,
    "linear": Linear,
    "wsd": WSD,
    "constant": Constant,
    "rex": REX,
    "none": NoSchedule,
}
