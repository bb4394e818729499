"""The seam for pipelines: `torch.distributed.pipelining` runs the stages, the contract is that of every seam.

Every rank of a pipeline reads the same batch, so token ids, document ids and labels are at hand on each stage, and only
hidden states and their gradients travel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor
from torch.distributed import pipelining

from forge.config import PipelineSchedule
from forge.distributed.context_parallel import shard_sequence
from forge.distributed.mesh import Mesh
from forge.distributed.pipeline import Stages, sum_tied_gradients
from forge.model import Transformer
from forge.model.block import BlockOutput
from forge.model.moe import without_capacity
from forge.pytree import PyTree
from forge.training.eval import EvalStep
from forge.training.extras import router_bias
from forge.training.grad import Micro, Params, ValueAndGrad, detached, total_of
from forge.training.grad_sharded import (
    all_reduce_sums,
    bind,
    lent,
    refuse_transforms,
    shared_micro_batches,
    take_gradients,
)
from forge.training.loss import LossFn, LossSums, check_labels
from forge.training.state import Batch

Call = Callable[..., Tensor]
"""(hidden states of the stage before, if there is one) -> hidden states, or the last stage's loss ()."""
Runner = Callable[[list[list[Call]]], None]
"""(for each stage here, its micro-batches) -> their gradients, left on the parameters."""


@frozen
class _Pipe:
    """What the stages of one rank are run with."""

    stages: Stages
    loss_fn: LossFn
    mesh: Mesh
    compute_dtype: torch.dtype
    sources: int = 0

    @property
    def device(self) -> torch.device:
        return next(self.stages.parameters()).device

    def hidden_shape(self, batch: Batch) -> tuple[int, int, int]:
        """Of what travels between stages, for a micro-batch that context parallelism has cut already."""
        sequences, tokens = batch.input_ids.shape
        return sequences, tokens // self.mesh.size("tp"), self.stages.config.dim

    def reduced(self, parts: list[LossSums]) -> LossSums:
        """The sums over stages, micro-batches and ranks; the same on every rank."""
        total = total_of(parts) if parts else self.nothing()
        return all_reduce_sums(all_reduce_sums(total, self.mesh.loss.get_group()), self.mesh.group("pp"))

    def nothing(self) -> LossSums:
        """What a stage without a head contributes."""
        zero = torch.zeros((), device=self.device)
        by_source = torch.zeros(self.sources, device=self.device) if self.sources else None
        return LossSums(
            total=zero,
            ce=zero,
            z=zero,
            aux=zero,
            tokens=zero.long(),
            source_ce=by_source,
            source_tokens=None if by_source is None else by_source.long(),
        )

    def with_routers(self, sums: LossSums, micro: Micro, layers: list[str], blocks: list[BlockOutput]) -> LossSums:
        """Add what the routers of one stage did; counts of all layers, so that the sums of all stages add up."""
        config = self.stages.config
        routed = [str(layer) for layer in range(config.n_layers) if config.is_moe_layer(layer)]
        if not routed:
            return sums
        counts = dict.fromkeys(routed, torch.zeros(config.moe.n_experts, dtype=torch.int64, device=self.device))
        aux = entropy = torch.zeros((), device=self.device)
        dropped = torch.zeros((), dtype=torch.int64, device=self.device)
        for layer, block in zip(layers, blocks, strict=True):
            if block.router is not None:
                counts[layer] = block.router.counts
                aux = aux + micro.targets * micro.share * block.router.loss
                entropy, dropped = entropy + block.router.entropy, dropped + block.router.dropped
        return evolve(
            sums,
            total=sums.total + aux,
            aux=aux.detach(),
            router_counts=counts,
            router_entropy=entropy,
            router_dropped=dropped,
        )


def build_pipeline_value_and_grad(
    stages: Stages,
    loss_fn: LossFn,
    *,
    mesh: Mesh,
    vocab_size: int,
    trainable: Collection[str] | None = None,
    schedule: PipelineSchedule = "1f1b",
    compute_dtype: torch.dtype = torch.float32,
    sources: int = 0,
) -> ValueAndGrad:
    """Build `value_and_grad(params, extras, batch)` over a pipeline; every rank must call it together.

    `params` and the gradients are those of this rank's stages, by their names in the whole model; the sums are those of
    the global batch on every rank. The schedule's micro-batches are those of the batch.

    Args:
        stages: after `parallelize` and `materialize`.
        mesh: of the process; `batch` holds this rank's share of the sequences, the same on every stage.
        trainable: names to differentiate; None = all.
        schedule: in which order forward and backward passes are run.
        compute_dtype: of the hidden states that travel.
        sources: as given to `build_loss_fn`.
    """
    pipe = _Pipe(stages, loss_fn, mesh, compute_dtype, sources)
    own: Params = dict(stages.named_parameters())
    runners: dict[tuple[int, ...], Runner] = {}

    def value_and_grad(params: Params, extras: PyTree, batch: Batch) -> tuple[LossSums, Params]:
        refuse_transforms(batch)
        check_labels(batch.labels, vocab_size)
        bind(own, params, trainable)
        micros = shared_micro_batches(batch, extras, mesh)
        shape = (len(micros), *micros[0].batch.input_ids.shape)
        if shape not in runners:
            runners[shape] = _build_runner(pipe, schedule, len(micros), pipe.hidden_shape(micros[0].batch))
        sums: list[LossSums] = []
        with torch.enable_grad():
            runners[shape]([_training_calls(pipe, stage, micros, sums) for stage in stages.transformers])
        grads = take_gradients(own)
        sum_tied_gradients(grads, stages, mesh)
        return pipe.reduced(sums), grads

    return value_and_grad


def _training_calls(pipe: _Pipe, stage: Transformer, micros: list[Micro], sums: list[LossSums]) -> list[Call]:
    """One stage's forward passes, which leave their sums behind."""

    def call(micro: Micro, hidden: Tensor | None = None) -> Tensor:
        batch, layers = micro.batch, list(stage.blocks)

        def output(x: Tensor, head_weight: Tensor, blocks: list[BlockOutput]) -> Tensor:
            last = stage.norm is not None
            found = pipe.loss_fn(x, head_weight, batch.labels, batch.source_ids) if last else pipe.nothing()
            found = pipe.with_routers(found, micro, layers, blocks)
            sums.append(detached(found))
            objective = found.total / micro.targets.clamp(min=1)
            return objective if last else _WithObjective.apply(x, objective)

        result: Tensor = stage(batch.input_ids, batch.doc_ids, hidden=hidden, output=output, **micro.router_bias)
        return result

    return [partial(call, micro) for micro in micros]


class _WithObjective(torch.autograd.Function):
    """x, and a stage's own part of the objective tied to it: the backward pass of x is also that of the objective.

    As Megatron-LM's MoEAuxLossAutoScaler.
    """

    @staticmethod
    def forward(x: Tensor, objective: Tensor) -> Tensor:
        return x.clone()  # what is sent gets detached in place, which a view refuses

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.seed = torch.ones_like(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.seed


class _Stage(pipelining.PipelineStage):
    """A stage that is told what to call for each micro-batch; hidden states are all that it is given."""

    calls: list[Call]

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """The forward pass of one micro-batch."""
        return super().forward_one_chunk(fwd_chunk_id, (), {"micro": fwd_chunk_id}, save_forward_output)

    def forward_maybe_with_nosync(self, *args: Tensor, micro: int) -> Tensor:
        """The module's own call, which knows the rest of the micro-batch."""
        return self.calls[micro](*args)


def _build_runner(pipe: _Pipe, schedule: PipelineSchedule, count: int, hidden_shape: tuple[int, ...]) -> Runner:
    """A schedule over `count` micro-batches. Shapes and dtypes are given, so that nothing is run to find them."""
    hidden = torch.empty(hidden_shape, dtype=pipe.compute_dtype, device="meta", requires_grad=True)
    loss = torch.empty((), device="meta", requires_grad=True)
    held: list[_Stage] = []
    for module, index in zip(pipe.stages.transformers, pipe.stages.indices, strict=True):
        last = index == pipe.stages.count - 1
        held.append(
            _Stage(
                module, index, pipe.stages.count, pipe.device,
                input_args=(hidden,) if index else (),
                output_args=(loss if last else hidden,),
                group=pipe.mesh.group("pp"),
            )
        )  # fmt: skip
    order = _build_schedule(schedule, held, count)

    def run(calls: list[list[Call]]) -> None:
        for stage, its_calls in zip(held, calls, strict=True):
            stage.calls = its_calls
        order.step(target=torch.zeros(count), return_outputs=False)
        for stage in held:
            stage.calls = []
            stage.clear_runtime_states()

    return run


def _build_schedule(schedule: PipelineSchedule, stages: list[Any], count: int) -> Any:
    def own_loss(loss: Tensor, _: Tensor) -> Tensor:
        return loss

    if schedule == "1f1b":
        return pipelining.Schedule1F1B(stages[0], count, own_loss, scale_grads=False)
    if schedule == "gpipe":
        return pipelining.ScheduleGPipe(stages[0], count, own_loss, scale_grads=False)
    if schedule == "interleaved_1f1b":
        return pipelining.ScheduleInterleaved1F1B(stages, count, own_loss, scale_grads=False)
    return pipelining.ScheduleInterleavedZeroBubble(stages, count, own_loss, scale_grads=False)


def build_pipeline_eval_step(
    stages: Stages, loss_fn: LossFn, *, mesh: Mesh, vocab_size: int, compute_dtype: torch.dtype = torch.float32
) -> EvalStep:
    """`eval_step(params, extras, batch)` over a pipeline, with any number of micro-batches; every rank calls it.

    Parameters other than the stages' own (an average) are lent to them for the call.
    """
    pipe = _Pipe(stages, loss_fn, mesh, compute_dtype)
    own: Params = dict(stages.named_parameters())

    @torch.no_grad()
    def eval_step(params: Params, extras: PyTree, batch: Batch) -> LossSums:
        check_labels(batch.labels, vocab_size)
        with lent(stages, own, params), without_capacity(stages):
            sums = _forward_only(pipe, extras, shard_sequence(batch, mesh.rank("cp"), mesh.size("cp")))
        return pipe.reduced(sums)

    return eval_step


def _forward_only(pipe: _Pipe, extras: PyTree, batch: Batch) -> list[LossSums]:
    """Every micro-batch through the stages here, one after the other; the last stage's sums."""
    group, sums = pipe.mesh.group("pp"), []
    sent: list[tuple[Tensor, Any]] = []  # a message and its handle, alive until it has arrived
    shape, ranks = pipe.hidden_shape(batch.micro(0)), group.size()
    for micro in map(batch.micro, range(batch.labels.shape[0])):
        for stage, index in zip(pipe.stages.transformers, pipe.stages.indices, strict=True):
            hidden = None
            if index:
                hidden = torch.empty(shape, dtype=pipe.compute_dtype, device=pipe.device)
                dist.recv(hidden, group=group, group_src=(index - 1) % ranks)
            last = index == pipe.stages.count - 1

            def output(x: Tensor, weight: Tensor, _: list[BlockOutput], micro: Batch = micro, last: bool = last) -> Any:
                return pipe.loss_fn(x, weight, micro.labels, None) if last else x.contiguous()

            result = stage(micro.input_ids, micro.doc_ids, hidden=hidden, output=output, **router_bias(extras))
            if last:
                sums.append(result)
            else:
                sent.append((result, dist.isend(result, group=group, group_dst=(index + 1) % ranks)))
    for _, work in sent:
        work.wait()
    return sums
