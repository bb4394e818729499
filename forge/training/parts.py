"""The parts of a run that its config determines: model, optimizer, schedule, and the steps made of them."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve, frozen

from forge.config import JobConfig
from forge.model import Transformer, build_model, init_params
from forge.pytree import tree_map
from forge.training.checkpointing import apply_activation_checkpointing, compile_blocks
from forge.training.eval import EvalStep, build_eval_step
from forge.training.extras import init_extras
from forge.training.freeze import ever_trainable, stage_boundaries, trainable_names
from forge.training.grad import build_value_and_grad
from forge.training.loss import build_eval_loss_fn, build_loss_fn
from forge.training.optimizer import Optimizer, build_optimizer, extend, parameter_roles, with_master_weights
from forge.training.runtime import Runtime
from forge.training.scheduler import Schedule, build_scheduler
from forge.training.state import TrainState, init_state
from forge.training.step import TrainStep, build_train_step


@frozen
class Parts:
    """What a training step and an evaluation are made of."""

    runtime: Runtime
    model: Transformer  # on the meta device
    optimizer: Optimizer
    schedule: Schedule
    eval_step: EvalStep


def build_parts(config: JobConfig, runtime: Runtime) -> Parts:
    """Build from a config; nothing is allocated yet.

    Raises:
        ConfigError: a freeze pattern matches no parameter.
    """
    model = build_model(config.model)
    names = [name for name, _ in model.named_parameters()]
    for boundary in stage_boundaries(config.train.freeze):
        trainable_names(config.train.freeze, names, boundary)
    optimizer = build_optimizer(config.optimizer, parameter_roles(model))
    if config.train.param_dtype != "fp32":
        optimizer = with_master_weights(optimizer)
    if config.train.activation_checkpointing == "full":
        apply_activation_checkpointing(model)
    if config.train.compile:
        compile_blocks(model)
    return Parts(
        runtime=runtime,
        model=model,
        optimizer=optimizer,
        schedule=build_scheduler(config.scheduler, config.train.steps),
        eval_step=build_eval_step(
            model,
            build_eval_loss_fn(config.train, config.model),
            vocab_size=config.model.vocab_size,
            compute_dtype=runtime.compute_dtype,
        ),
    )


def initial_state(config: JobConfig, parts: Parts) -> TrainState:
    """The state before the first update."""
    runtime = parts.runtime
    params = init_params(parts.model, config.model, config.train.seed, dtype=runtime.param_dtype, device=runtime.device)
    learned = trainable_names(config.train.freeze, params, 0)
    opt_state = parts.optimizer.init({name: params[name] for name in params if name in learned})
    return init_state(params, opt_state, init_extras(config.model, runtime.device))


def template_state(config: JobConfig, parts: Parts, step: int) -> TrainState:
    """A state on the meta device: structure, shapes and dtypes of the one after `step` batches."""
    named = dict(parts.model.named_parameters())
    params = {name: p.detach().to(parts.runtime.param_dtype) for name, p in named.items()}
    learned = ever_trainable(config.train.freeze, params, max(0, step - 1))
    opt_state = parts.optimizer.init({name: params[name] for name in params if name in learned})
    return tree_map(lambda leaf: leaf.to("meta"), init_state(params, opt_state, init_extras(config.model)))


def step_for(config: JobConfig, parts: Parts) -> Callable[[int, TrainState], tuple[TrainStep, TrainState]]:
    """`step_at(n, state)`: the donating step for update n, and the state made ready for it.

    Where a stage of `train.freeze` begins at n, the parameters that are trained from then on get optimizer state.
    """
    stages = config.train.freeze
    loss_fn = build_loss_fn(config.train, config.model)
    steps: dict[frozenset[str] | None, TrainStep] = {}

    def build(trainable: frozenset[str] | None) -> TrainStep:
        seam = build_value_and_grad(
            parts.model,
            loss_fn,
            vocab_size=config.model.vocab_size,
            compute_dtype=parts.runtime.compute_dtype,
            trainable=trainable,
        )
        return build_train_step(
            config, value_and_grad=seam, optimizer=parts.optimizer, schedule=parts.schedule, donate=True
        )

    def step_at(step: int, state: TrainState) -> tuple[TrainStep, TrainState]:
        learned = trainable_names(stages, state.params, step) if stages else None
        if learned is not None and step in stage_boundaries(stages):
            trained = {name: state.params[name] for name in state.params if name in learned}
            state = evolve(state, opt_state=extend(parts.optimizer, state.opt_state, trained))
        if learned not in steps:
            steps[learned] = build(learned)
        return steps[learned], state

    return step_at
