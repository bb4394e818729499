"""The `data` and `eval` sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from attrs import Attribute, evolve, field, frozen

from forge.config.checks import boolean, each, instance_of, integer, number, one_of, optional, text, word
from forge.errors import ConfigError, did_you_mean


def _weights(instance: object, attribute: Attribute[Any], value: object) -> None:
    """Validator: a table of numbers >= 0."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{instance.SECTION}.{attribute.name} must be a table, got {value!r}")  # type: ignore[attr-defined]
    for name, weight in value.items():
        number(least=0)(instance, attribute.evolve(name=f"{attribute.name}.{name}"), weight)


@frozen
class DataSource:
    """One of several sources that a run mixes."""

    SECTION: ClassVar[str] = "data.sources"

    name: str = field(validator=word())
    """What metrics and phases call it."""
    path: str = field(validator=text())
    """As data.path."""
    weight: float = field(default=1.0, validator=number(least=0))
    """Its share of the sequences, relative to the other sources'; 0 = none before a phase says so."""


@frozen
class DataPhase:
    """From update `start_step` on: other weights, another learning rate. Sources go on where they were."""

    SECTION: ClassVar[str] = "data.phases"

    start_step: int = field(validator=integer(least=1))
    """First update of the phase (updates are counted from 0)."""
    weights: dict[str, float] = field(factory=dict, validator=_weights, hash=False)
    """Weights by source; one that is not named is not drawn. Empty = as before."""
    lr_scale: float = field(default=1.0, validator=number(least=0))
    """What the scheduled learning rate is multiplied by, up to the next phase."""


@frozen
class DataConfig:
    """What is read, and how it becomes sequences."""

    SECTION: ClassVar[str] = "data"

    path: str = field(default="stdlib", validator=text())
    """A prepared folder; a file, folder or glob of text, JSON lines, Parquet or tokens; 'hf:NAME'; 'stdlib'; or a
    stream: 'hf-stream:NAME'."""
    sources: tuple[DataSource, ...] = field(default=(), validator=each(instance_of(DataSource, "a data source")))
    """Several sources in the place of data.path, mixed by their weights (TOML: [[data.sources]])."""
    temperature: float = field(default=1.0, validator=number(above=0))
    """Shares are weight^(1 / temperature), normalised; above 1 they come closer to each other."""
    phases: tuple[DataPhase, ...] = field(default=(), validator=each(instance_of(DataPhase, "a data phase")))
    """Other weights and learning rates from a step on (TOML: [[data.phases]])."""
    anneal_start_step: int | None = field(default=None, validator=optional(integer(least=1)))
    """Shortcut for a last phase: its first update; unset = no annealing."""
    anneal_weights: dict[str, float] = field(factory=dict, validator=_weights, hash=False)
    """Weights of the annealing phase, by source (TOML: [data.anneal_weights])."""
    anneal_lr_scale: float = field(default=1.0, validator=number(least=0))
    """Learning-rate factor of the annealing phase."""
    tokenizer: str = field(default="bytes", validator=text())
    """'bytes', or the path of a tokenizer.json."""
    text_key: str = field(default="text", validator=text())
    """Key or column of the text in JSON lines, Parquet and datasets."""
    raw_dtype: Literal["auto", "uint16", "uint32"] = field(default="auto", validator=one_of("auto", "uint16", "uint32"))
    """Of token files without a header; auto = 16 bits where the tokenizer's vocabulary fits."""
    eval_fraction: float = field(default=0.02, validator=number(least=0, most=0.5))
    """Share of the documents held out for evaluation."""
    isolate_documents: bool = field(default=True, validator=boolean())
    """Tokens attend within their document and no document predicts the next one's first token."""
    prefetch: int = field(default=2, validator=integer(least=0))
    """Batches made ahead in the background; 0 = none."""
    workers: int = field(default=1, validator=integer(least=1))
    """Background threads that make them; the order does not depend on it."""
    cache_dir: str = field(default="~/.cache/forge", validator=text())
    """Where text given by path is kept as tokens."""

    def __attrs_post_init__(self) -> None:
        names = [source.name for source in self.sources]
        _refuse_twice("data.sources", names)
        if not any(source.weight for source in self.sources) and self.sources:
            raise ConfigError("data.sources: every weight is 0; give at least one source a weight above 0")
        if self.anneal_start_step is None and (self.anneal_weights or self.anneal_lr_scale != 1.0):
            raise ConfigError("data.anneal_weights and data.anneal_lr_scale need data.anneal_start_step")
        before = 0
        for phase in self.all_phases:
            if phase.start_step <= before:
                raise ConfigError(
                    f"data.phases: start_step = {phase.start_step} follows {before}; phases stand in the order of their"
                    " steps, the annealing phase last"
                )
            before = phase.start_step
            self._check_weights(phase, names)

    def _check_weights(self, phase: DataPhase, names: Sequence[str]) -> None:
        where = f"the weights of the phase from step {phase.start_step}"
        for name in phase.weights:
            if name not in names:
                known = f"data.sources has {', '.join(names) or 'none'}"
                raise ConfigError(f"{where} name {name!r}{did_you_mean(name, names)}; {known}")
        if phase.weights and not any(phase.weights.values()):
            raise ConfigError(f"{where} are all 0; give at least one source a weight above 0")

    @property
    def all_phases(self) -> tuple[DataPhase, ...]:
        """The phases in order, the annealing one last."""
        if self.anneal_start_step is None:
            return self.phases
        return (*self.phases, DataPhase(self.anneal_start_step, self.anneal_weights, self.anneal_lr_scale))

    def weights_by_step(self) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """(first update, weight of each source) of every stretch between changes of the weights."""
        found = [(0, tuple(source.weight for source in self.sources))]
        for phase in self.all_phases:
            if phase.weights:
                found.append((phase.start_step, tuple(phase.weights.get(s.name, 0.0) for s in self.sources)))
        return tuple(found)

    def alone(self, path: str, eval_fraction: float | None = None) -> DataConfig:
        """The same section for one path, without mixing."""
        plain: dict[str, Any] = {"path": path, "sources": (), "phases": (), "anneal_start_step": None}
        plain |= {"anneal_weights": {}, "anneal_lr_scale": 1.0}
        return evolve(self, **plain, eval_fraction=self.eval_fraction if eval_fraction is None else eval_fraction)


def _refuse_twice(key: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{key}: the name {name!r} is given {names.count(name)} times; names must differ")


@frozen
class EvalSource:
    """A set to evaluate on beside the held-out part of the training data."""

    SECTION: ClassVar[str] = "eval.sets"

    name: str = field(validator=word())
    """Its results are eval/<name>/loss and so on."""
    path: str = field(validator=text())
    """As data.path; of a prepared folder its held-out part where it has one, else all of it."""


@frozen
class EvalConfig:
    """Held-out loss, and a sample of what the model writes."""

    SECTION: ClassVar[str] = "eval"

    interval: int = field(default=0, validator=integer(least=0))
    """Updates between evaluations; 0 = none. With an interval, the last update is evaluated too."""
    batches: int = field(default=32, validator=integer(least=1))
    """Most batches an evaluation; a smaller set is taken whole, each batch once."""
    batch_size: int = field(default=8, validator=integer(least=1))
    """Sequences a batch."""
    sets: tuple[EvalSource, ...] = field(default=(), validator=each(instance_of(EvalSource, "an evaluation set")))
    """Further sets (TOML: [[eval.sets]]), each evaluated on at most `batches` batches and reported by name."""
    sample_tokens: int = field(default=0, validator=integer(least=0))
    """Tokens to generate at the end of the run; 0 = none."""
    sample_prompt: str = field(default="def ", validator=text())
    """Text that the sample continues."""
    sample_temperature: float = field(default=0.8, validator=number(least=0))
    """Temperature of the sample; 0 = the likeliest token."""

    def __attrs_post_init__(self) -> None:
        _refuse_twice("eval.sets", [each_set.name for each_set in self.sets])
