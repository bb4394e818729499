"""What a run will take, by calculation: parameters, FLOPs, memory by part, time. Nothing is allocated."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode

from forge.config import JobConfig
from forge.errors import ConfigError
from forge.metrics import ParameterCount, count_flops_per_token, count_parameters, device_peak_tflops
from forge.model.attention import CUDA_KERNELS
from forge.model.block import BlockOutput
from forge.pytree import tree_leaves, wide
from forge.training.freeze import stage_boundaries, trainable_names
from forge.training.loss import LossSums, build_loss_fn, chunk_size
from forge.training.parts import Parts, build_parts, template_state
from forge.training.runtime import build_runtime


class _Made(TorchDispatchMode):
    """What operations made, for as long as something holds it.

    A grouped product gets its shape here: torch's own rule refuses fp32, which the CPU kernel takes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            out = args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        else:
            out = func(*args, **(kwargs or {}))
        for tensor in torch_pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        return out

    def held(self) -> dict[int, int]:
        """Bytes of each storage that is left."""
        left = [storage for storage in (reference() for reference in self._storages.values()) if storage is not None]
        return {storage._cdata: storage.nbytes() for storage in left}


@frozen
class Plan:
    """Sizes of one run on one device."""

    parameters: ParameterCount
    flops_per_token: float  # forward and backward
    total_tokens: int
    memory: dict[str, int]  # bytes by part
    tflops: float  # rate assumed for the time, 1e12 FLOP/s

    @property
    def total_flops(self) -> float:
        """FLOPs of the whole run."""
        return self.flops_per_token * self.total_tokens

    @property
    def seconds(self) -> float:
        """Time of the whole run at the assumed rate."""
        return self.total_flops / (self.tflops * 1e12)


def plan_run(config: JobConfig, *, tflops: float) -> Plan:
    """Calculate what `run_training(config)` will take.

    Args:
        tflops: rate at which the run computes, in 1e12 FLOP/s: a device's peak times the MFU that you expect.

    Raises:
        ConfigError: a tensor of the run would have more elements than can be addressed.
    """
    check_addressable(config)
    replayed, config = config.train.cuda_graphs, countable(config)
    runtime = build_runtime(config)
    parts = build_parts(config, runtime)
    state = template_state(config, parts, config.train.steps)
    learned = learned_names(config, state.params)
    trained = [state.params[name] for name in learned]
    casts = runtime.compute_dtype != runtime.param_dtype

    def cast_bytes(tensors: Iterable[Tensor]) -> int:
        return sum(tensor.numel() for tensor in tensors) * runtime.compute_dtype.itemsize if casts else 0

    memory = {
        "parameters": tree_bytes(state.params),
        "their casts": cast_bytes(state.params.values()),
        "gradients": _gradient_bytes(config, trained),
        **({"bf16 gradients": cast_bytes(trained)} if casts and replayed else {}),
        "optimizer": tree_bytes(state.opt_state),
        **({"average": tree_bytes(state.extras["ema"])} if "ema" in state.extras else {}),
        "activations": activation_bytes(config, parts),
        "logits": logit_bytes(config),
    }
    return Plan(
        parameters=count_parameters(config.model),
        flops_per_token=count_flops_per_token(config.model, config.train.seq_len),
        total_tokens=config.train.steps * config.train.global_batch_size * config.train.seq_len,
        memory=memory,
        tflops=tflops,
    )


def _gradient_bytes(config: JobConfig, trained: list[Tensor]) -> int:
    """Gradients in the parameters' dtype, beside the wide ones in which micro-batches add up where that is narrow."""
    added_up = [p.to(wide(p)) for p in trained if config.accumulation_steps() > 1 and p.dtype != wide(p)]
    return tree_bytes(trained) + tree_bytes(added_up)


def check_addressable(config: JobConfig) -> None:
    """Refuse tensors that no machine could address.

    Raises:
        ConfigError: one has too many elements.
    """
    model, train = config.model, config.train
    widths = (model.dim, model.query_heads * model.head_width, model.ffn_width, model.vocab_size, train.seq_len)
    widest = max(*widths, model.expert_width * model.moe.top_k)
    elements = max(count_parameters(model).total, train.micro_batch_size * train.seq_len * widest)
    if elements >= 2**58:
        raise ConfigError(f"{elements:.3g} numbers cannot be addressed: make model, train.seq_len or the batch smaller")


def measured_tflops(config: JobConfig) -> float:
    """Peak of the device that this process would train on: by its name, or measured on a CPU."""
    runtime = build_runtime(config)
    return config.metrics.peak_tflops or device_peak_tflops(runtime.device, runtime.compute_dtype)


def activation_bytes(config: JobConfig, parts: Parts) -> int:
    """Bytes that autograd keeps of one micro-batch's forward pass, counted on tensors without storage.

    With activation checkpointing, what one block computes again is added: it lives while its gradient is made.
    """
    kept = saved_bytes(config, parts)
    if config.train.activation_checkpointing == "none":
        return kept
    plain = build_parts(_without_checkpointing(config), parts.runtime)
    return kept + (saved_bytes(config, plain) - kept) // config.model.n_layers


def _without_checkpointing(config: JobConfig) -> JobConfig:
    return evolve(config, train=evolve(config.train, activation_checkpointing="none"))


def countable(config: JobConfig) -> JobConfig:
    """The run as it is counted, on any machine: on tensors without storage, with which nothing can be compiled.

    What a compiler fuses away is not counted off. Of fp8 autograd keeps nothing: it keeps what was rounded. Kernels
    that only CUDA has keep what `auto` does.
    """
    model = config.model
    if model.attention_backend in CUDA_KERNELS:
        model = evolve(model, attention_backend="auto")
    return evolve(config, model=model, train=evolve(config.train, compile=False, cuda_graphs=False, fp8=False))


def learned_names(config: JobConfig, params: dict[str, Tensor]) -> frozenset[str]:
    """The parameters with a gradient, at the update that has most of them."""
    starts = [start for start in stage_boundaries(config.train.freeze) if start < config.train.steps]
    sets = [trainable_names(config.train.freeze, params, start) for start in starts]
    return max(sets, key=lambda names: tree_bytes([params[name] for name in names]))


def saved_bytes(config: JobConfig, parts: Parts) -> int:
    """What autograd keeps of one micro-batch, under the config's own activation checkpointing."""
    loss_fn = build_loss_fn(config.train, config.model)
    named = {name: p.detach() for name, p in parts.model.named_parameters()}
    learned = learned_names(config, named)
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
        return tensor

    with FakeTensorMode(), torch.enable_grad():
        ids = torch.zeros(config.train.micro_batch_size, config.train.seq_len, dtype=torch.int64)
        doc_ids = ids.clone() if config.data.isolate_documents else None
        params = {
            name: torch.empty(p.shape, dtype=parts.runtime.compute_dtype).requires_grad_(name in learned)
            for name, p in named.items()
        }

        def output(hidden: Tensor, weight: Tensor, _: list[BlockOutput]) -> LossSums:
            return loss_fn(hidden, weight, ids.clone(), None)

        with _Made() as made, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            total = functional_call(parts.model, params, (ids, doc_ids), {"output": output}).total
        if config.train.activation_checkpointing == "selective":
            storages |= made.held()  # what it keeps is none of autograd's tensors
        for parameter in params.values():
            storages.pop(parameter.untyped_storage()._cdata, None)
        del total
    return sum(storages.values())


def logit_bytes(config: JobConfig) -> int:
    """At most two fp32 buffers of one chunk of logits, or of all of them for the plain loss."""
    tokens = config.train.micro_batch_size * config.train.seq_len
    chunk = chunk_size(config.train.loss_chunk_size, "cuda")  # a plan is for any device, and CUDA's is the larger
    rows = tokens if config.train.loss == "plain" else min(tokens, chunk)
    return 2 * 4 * rows * config.model.vocab_size


def tree_bytes(tree: object) -> int:
    """Of all leaves together."""
    return sum(leaf.nbytes for leaf in tree_leaves(tree))


def format_plan(plan: Plan) -> str:
    """The plan as a table of lines."""
    counts = plan.parameters
    lines = [f"parameters      {format_count(counts.total):>10}   active {format_count(counts.active)}"]
    lines += [f"  {part:<14}{format_count(count):>10}" for part, count in counts.by_part.items() if count]
    lines += [
        f"FLOPs           {plan.flops_per_token:>10.4g}   a token, forward and backward",
        f"                {plan.total_flops:>10.4g}   for {format_count(plan.total_tokens)} tokens",
        f"memory          {format_size(sum(plan.memory.values())):>10}   on one device",
    ]
    lines += [f"  {part:<14}{format_size(size):>10}" for part, size in plan.memory.items() if size]
    lines.append(f"time            {format_duration(plan.seconds):>10}   at {plan.tflops:.4g} TFLOP/s")
    return "\n".join(lines)


def format_count(number: float) -> str:
    """In thousands, millions, billions or trillions."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {suffix}"
    return f"{number:.0f}"


def format_size(number: float) -> str:
    """Bytes in the unit that fits."""
    for exponent, suffix in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 2**exponent:
            return f"{number / 2**exponent:.2f} {suffix}"
    return f"{number:.0f} B"


def format_duration(seconds: float) -> str:
    """In the unit that fits."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds"
