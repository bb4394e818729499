"""The parts of a run that its config determines: model, optimizer, schedule, and the steps made of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attrs import evolve, frozen
from torch import Tensor

from forge.config import JobConfig
from forge.distributed.parallelize import allocate, materialize, parallelize, parallelize_stages
from forge.distributed.pipeline import Stages, build_pipeline_norm
from forge.distributed.shards import as_sharded, local_data, sharded_norm
from forge.errors import ConfigError
from forge.model import Transformer, build_model, init_params
from forge.model.attention import check_attention_backend
from forge.model.fp8 import check_fp8
from forge.pytree import PyTree
from forge.training.average import init_ema
from forge.training.eval import EvalStep, build_eval_step
from forge.training.extras import init_extras
from forge.training.freeze import ever_trainable, stage_boundaries, trainable_names
from forge.training.grad import ValueAndGrad, build_value_and_grad
from forge.training.grad_pipeline import build_pipeline_eval_step, build_pipeline_value_and_grad
from forge.training.grad_sharded import build_sharded_eval_step, build_sharded_value_and_grad
from forge.training.loss import build_eval_loss_fn, build_loss_fn
from forge.training.optimizer import Optimizer, extend, init_opt_state, job_optimizer, parameter_roles
from forge.training.optimizer.muon_sharded import sharded_orthogonal_steps
from forge.training.runtime import Runtime
from forge.training.scheduler import Schedule, build_scheduler, scaled_by_phase
from forge.training.spikes import init_spikes
from forge.training.state import TrainState, init_state
from forge.training.step import TrainStep, build_train_step


@frozen
class Parts:
    """What a training step and an evaluation are made of."""

    runtime: Runtime
    model: Transformer | Stages  # on the meta device
    names: tuple[str, ...]  # of the whole model's parameters, of which a pipeline rank has some
    optimizer: Optimizer
    schedule: Schedule
    eval_step: EvalStep


def build_parts(config: JobConfig, runtime: Runtime) -> Parts:
    """Build from a config; nothing is allocated yet.

    Raises:
        ConfigError: a freeze pattern matches no parameter; experts of a width that their product does not take.
    """
    whole = build_model(config.model)
    names = tuple(name for name, _ in whole.named_parameters())
    for boundary in stage_boundaries(config.train.freeze):
        trainable_names(config.train.freeze, names, boundary)
    roles = parameter_roles(whole)
    model = _parallelized(whole, config, runtime)
    orthogonal_steps = None
    if runtime.mesh is not None:
        orthogonal_steps = sharded_orthogonal_steps(dict(model.named_parameters()), runtime.mesh)
    return Parts(
        runtime=runtime,
        model=model,
        names=names,
        optimizer=job_optimizer(config, roles, orthogonal_steps=orthogonal_steps),
        schedule=scaled_by_phase(build_scheduler(config.scheduler, config.train.steps), config.data.all_phases),
        eval_step=_eval_step(config, runtime, model),
    )


def _parallelized(model: Transformer, config: JobConfig, runtime: Runtime) -> Transformer | Stages:
    """The model in this process's layout; a pipeline rank has its stages only."""
    if config.train.fp8:
        check_fp8(runtime.device, runtime.compute_dtype)
    check_attention_backend(config, runtime.device)
    if config.train.cuda_graphs and runtime.device.type != "cuda":
        raise ConfigError(f"train.cuda_graphs = true needs CUDA, and this is a {runtime.device.type}: set it to false")
    dtypes = {"compute_dtype": runtime.compute_dtype, "param_dtype": runtime.param_dtype}
    if runtime.mesh is not None and runtime.mesh.size("pp") > 1:
        return parallelize_stages(model, config, runtime.mesh, **dtypes)
    parallelize(model, config, runtime.mesh, **dtypes)
    return model


def _eval_step(config: JobConfig, runtime: Runtime, model: Transformer | Stages) -> EvalStep:
    loss_fn = build_eval_loss_fn(config.train, config.model, vocab_group=runtime.vocab_group)
    vocab_size = config.model.vocab_size
    if isinstance(model, Stages):
        assert runtime.mesh is not None
        return build_pipeline_eval_step(
            model, loss_fn, mesh=runtime.mesh, vocab_size=vocab_size, compute_dtype=runtime.compute_dtype
        )
    if runtime.mesh is not None:
        return build_sharded_eval_step(model, loss_fn, mesh=runtime.mesh, vocab_size=vocab_size)
    return build_eval_step(model, loss_fn, vocab_size=vocab_size, compute_dtype=runtime.compute_dtype)


def initial_state(config: JobConfig, parts: Parts, params: dict[str, Tensor] | None = None) -> TrainState:
    """The state before the first update: from parameters laid out for this process, or from the seed."""
    runtime = parts.runtime
    if params is not None:
        params = _own(parts, params)
    elif runtime.mesh is None:
        model, seed = parts.model, config.train.seed
        params = init_params(model, config.model, seed, dtype=runtime.param_dtype, device=runtime.device)
    else:
        params = materialize(parts.model, config, runtime.device)
    learned = trainable_names(config.train.freeze, parts.names, 0)
    opt_state = init_opt_state(parts.optimizer, {name: params[name] for name in params if name in learned})
    return init_state(params, opt_state, _extras(config, params))


def adopt(parts: Parts, state: TrainState) -> TrainState:
    """A loaded state whose parameters are the sharded module's own; itself on one process."""
    return evolve(state, params=_own(parts, state.params))


def _own(parts: Parts, params: dict[str, Tensor]) -> dict[str, Tensor]:
    if parts.runtime.mesh is None:
        return params
    own = {name: p.detach() for name, p in parts.model.named_parameters()}
    if any(local_data(p).is_meta for p in own.values()):
        own = allocate(parts.model, parts.runtime.device)
    for name, parameter in own.items():
        local_data(parameter).copy_(local_data(params[name]))
    return own


def template_state(config: JobConfig, parts: Parts, step: int) -> TrainState:
    """A state on the meta device: structure, shapes, dtypes and layout of the one after `step` batches."""
    named = dict(parts.model.named_parameters())
    dtype = parts.runtime.param_dtype
    params = {name: as_sharded(local_data(p).to("meta", dtype), p) for name, p in named.items()}
    learned = ever_trainable(config.train.freeze, parts.names, max(0, step - 1))
    opt_state = init_opt_state(parts.optimizer, {name: params[name] for name in params if name in learned})
    return init_state(params, opt_state, _extras(config, params))


def _extras(config: JobConfig, params: dict[str, Tensor]) -> PyTree:
    device = next(iter(params.values())).device
    return {
        **init_extras(config.model, device),
        **init_spikes(config.train, device),
        **init_ema(config.train, params),
    }


def step_for(config: JobConfig, parts: Parts) -> Callable[[int, TrainState], tuple[TrainStep, TrainState]]:
    """`step_at(n, state)`: the donating step for update n, and the state made ready for it.

    Where a stage of `train.freeze` begins at n, the parameters that are trained from then on get optimizer state.
    """
    stages, norm = config.train.freeze, _norm_for(parts)
    steps: dict[frozenset[str] | None, TrainStep] = {}

    def build(trainable: frozenset[str] | None) -> TrainStep:
        return build_train_step(
            config,
            value_and_grad=seam_for(config, parts, trainable),
            optimizer=parts.optimizer,
            schedule=parts.schedule,
            donate=True,
            global_norm=norm,
        )

    def step_at(step: int, state: TrainState) -> tuple[TrainStep, TrainState]:
        learned = trainable_names(stages, parts.names, step) if stages else None
        if learned is not None and step in stage_boundaries(stages):
            trained = {name: state.params[name] for name in state.params if name in learned}
            state = evolve(state, opt_state=extend(parts.optimizer, state.opt_state, trained))
        if learned not in steps:
            steps[learned] = build(learned)
        return steps[learned], state

    return step_at


def _norm_for(parts: Parts) -> Callable[[dict[str, Tensor]], Tensor] | None:
    """The 2-norm of all gradients of a model on several ranks; one process needs no other than its own."""
    mesh = parts.runtime.mesh
    if mesh is None:
        return None
    if isinstance(parts.model, Stages):
        return build_pipeline_norm(parts.model, mesh)
    return partial(sharded_norm, stage_ranks=mesh.stage_ranks)


def seam_for(config: JobConfig, parts: Parts, trainable: frozenset[str] | None = None) -> ValueAndGrad:
    """The `value_and_grad` of this process's layout."""
    runtime, vocab_size, sources = parts.runtime, config.model.vocab_size, len(config.data.sources)
    loss_fn = build_loss_fn(config.train, config.model, sources, vocab_group=runtime.vocab_group)
    if isinstance(parts.model, Stages):
        assert runtime.mesh is not None
        return build_pipeline_value_and_grad(
            parts.model,
            loss_fn,
            mesh=runtime.mesh,
            vocab_size=vocab_size,
            trainable=trainable,
            schedule=config.distributed.pp_schedule,
            compute_dtype=runtime.compute_dtype,
            sources=sources,
        )
    if runtime.mesh is not None:
        return build_sharded_value_and_grad(
            parts.model, loss_fn, mesh=runtime.mesh, vocab_size=vocab_size, trainable=trainable
        )
    return build_value_and_grad(
        parts.model,
        loss_fn,
        vocab_size=vocab_size,
        compute_dtype=runtime.compute_dtype,
        trainable=trainable,
        cuda_graphs=config.train.cuda_graphs,
    )
