"""The `train` section: how long, how much at once, in which precision, with which loss."""

from __future__ import annotations

from typing import ClassVar, Literal

from attrs import field, frozen

from forge.config.checks import boolean, each, instance_of, integer, number, one_of, optional, text


@frozen
class FreezeStage:
    """From update `start_step` on, the parameters that match `patterns` are frozen or trained again.

    Stages act in order of their position; the last one that matches a parameter decides.
    """

    SECTION: ClassVar[str] = "train.freeze"

    patterns: tuple[str, ...] = field(validator=each(text()))
    """fnmatch patterns over parameter names, or an alias: all, embeddings, head, norms, attention, mlp, blocks."""
    frozen: bool = field(default=True, validator=boolean())
    """Freeze, or train again."""
    start_step: int = field(default=0, validator=integer(least=0))
    """First update at which the stage holds."""


@frozen
class TrainConfig:
    """The training step and how often it is taken."""

    SECTION: ClassVar[str] = "train"

    steps: int = field(default=1000, validator=integer(least=1))
    """Updates in all."""
    seq_len: int = field(default=1024, validator=integer(least=1))
    """Tokens a sequence."""
    global_batch_size: int = field(default=32, validator=integer(least=1))
    """Sequences an update, over all devices."""
    micro_batch_size: int = field(default=8, validator=integer(least=1))
    """Sequences a device takes through one forward pass."""
    seed: int = field(default=0, validator=integer(least=0))
    """Seed of the initial weights."""
    data_seed: int = field(default=0, validator=integer(least=0))
    """Seed of the data order."""
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", validator=one_of("auto", "cpu", "cuda"))
    """Where to train; auto = the first CUDA device, else the CPU."""
    precision: Literal["auto", "fp32", "bf16"] = field(default="auto", validator=one_of("auto", "fp32", "bf16"))
    """Dtype of the forward and backward pass; auto = bf16 on CUDA, fp32 on a CPU. The loss is always fp32."""
    fp8: bool = field(default=False, validator=boolean())
    """Products of the blocks' projections in fp8 (pip install torchao; CUDA of capability 8.9 or newer)."""
    param_dtype: Literal["fp32", "bf16"] = field(default="fp32", validator=one_of("fp32", "bf16"))
    """Dtype of the stored parameters; bf16 ones are updated through fp32 masters in the optimizer state."""
    grad_clip_norm: float | None = field(default=1.0, validator=optional(number(above=0)))
    """Longest global gradient norm; unset = no clipping."""
    loss: Literal["fused", "chunked", "plain"] = field(default="fused", validator=one_of("fused", "chunked", "plain"))
    """fused makes the gradient chunk by chunk, without the logits; plain can be differentiated again and again."""
    loss_chunk_size: int | None = field(default=None, validator=optional(integer(least=1)))
    """Tokens a chunk of the fused and chunked loss; unset = 256 on a CPU, whose caches then hold it, 1024 on CUDA."""
    z_loss_weight: float = field(default=0.0, validator=number(least=0))
    """Weight of logsumexp(logits)^2 over target tokens (PaLM 2022, sec. 5: 1e-4)."""
    label_smoothing: float = field(default=0.0, validator=number(least=0, most=0.999999))
    """Share of each target spread evenly over the vocabulary."""
    activation_checkpointing: Literal["none", "selective", "full"] = field(
        default="none", validator=one_of("none", "selective", "full")
    )
    """full computes each block again in the backward pass and keeps only its input; selective keeps besides what
    attention, collectives and every second matrix product returned."""
    compile: bool = field(default=False, validator=boolean())
    """torch.compile, block by block or as compile_scope says."""
    compile_scope: Literal["block", "model"] = field(default="block", validator=one_of("block", "model"))
    """block compiles one block for all that are alike, however many; model compiles all blocks as one, which pays where
    they are few and small, in one process (not with experts in fp32)."""
    cuda_graphs: bool = field(default=False, validator=boolean())
    """Replay what compile compiled as CUDA graphs: saves launching each kernel, which pays where they are short. On
    CUDA, in one process; parameters rounded to bf16 are kept, with their gradients, through the step."""
    deterministic: bool = field(default=False, validator=boolean())
    """Refuse kernels whose result depends on scheduling."""
    max_consecutive_skips: int = field(default=10, validator=integer(least=1))
    """Most updates that may be skipped in a row (a non-finite loss or gradient, a spike); after one more the run rolls
    back or stops, once the flags are read: every metrics.log_interval updates, or this many if they are fewer."""
    spike_sigma: float | None = field(default=None, validator=optional(number(above=0)))
    """Skip updates whose loss or gradient norm exceeds the mean of the window by this many deviations; unset = none."""
    spike_window: int = field(default=128, validator=integer(least=2))
    """Finite updates in the window, skipped ones included; before it is full, nothing is a spike."""
    ema_decay: float | None = field(default=None, validator=optional(number(least=0, most=0.9999999)))
    """Keep an exponential average of the parameters over the updates, and evaluate, sample and export that in their
    place: 0.999 averages over some 1000 updates. It takes 4 bytes a parameter; unset = none."""
    max_rollbacks: int = field(default=0, validator=integer(least=0))
    """Times that a run goes back to the checkpoint before too many skips, and on past the data since; 0 = it stops."""
    freeze: tuple[FreezeStage, ...] = field(default=(), validator=each(instance_of(FreezeStage, "a freeze stage")))
    """Frozen parameters by stage (TOML: [[train.freeze]])."""
