"""What a model computes on the way: activations and attention weights at named sites, as a function of its input."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from forge.errors import ConfigError, RunError, did_you_mean
from forge.files import replace_file
from forge.model import Transformer
from forge.model.attention import Attention
from forge.model.recompute import is_compiled
from forge.pytree import PyTree
from forge.training.extras import router_bias

INDEX = "index.jsonl"
_WEIGHTS = ".weights"


def capture(
    model: Transformer,
    params: dict[str, Tensor],
    input_ids: Tensor,
    sites: Sequence[str],
    *,
    doc_ids: Tensor | None = None,
    extras: PyTree | None = None,
) -> dict[str, Tensor]:
    """Run the model and return what it computed at `sites`, by name in the model's order; it stays as it was.

    A site is a module's name and stands for its output, the first part where it has several: `embed`, `blocks.3` (the
    residual stream after block 3), `blocks.3.attn`, `blocks.3.mlp.w_up`, `norm`; `head` stands for the logits. Beside
    them, `blocks.3.attn.weights` is the attention of each query to each key, (B, heads, S, S). Gradients flow from the
    values to `params`, but under `torch.no_grad`.

    Args:
        model: from `build_model`, its blocks not compiled.
        input_ids: int64 (B, S).
        sites: names, or patterns in which `*` stands for one part: `blocks.*.mlp`.
        doc_ids: int64 (B, S); tokens attend only within their document.
        extras: the state's, for the routers' biases.

    Raises:
        ConfigError: a site that the model does not have, compiled blocks, or weights of flex_attention.
    """
    names = matching_sites(model, sites)
    weights = any(name.endswith(_WEIGHTS) for name in names)
    if weights and input_ids.is_cuda and model.config.attention_backend == "flex":
        raise ConfigError("flex_attention makes no weights to capture: build the model with attention_backend = auto")
    if is_compiled(model):
        raise ConfigError("capture cannot look into compiled blocks: give it build_model(config), which costs nothing")
    found: dict[str, Tensor] = {}
    with _watched(model, set(names), found):
        found["head"] = functional_call(model, params, (input_ids, doc_ids), router_bias(extras or {}))
    return {name: found[name] for name in names}


def capture_sites(model: Transformer) -> list[str]:
    """The names of all sites of a model."""
    names: list[str] = []
    for name, module in model.named_modules():
        if name not in ("", "head", "blocks"):
            names.append(name)
        if isinstance(module, Attention):
            names.append(name + _WEIGHTS)
    return [*names, "head"]


def matching_sites(model: Transformer, patterns: Sequence[str]) -> list[str]:
    """The sites that match a pattern part by part, in the model's order.

    Raises:
        ConfigError: a pattern matches none.
    """
    known = capture_sites(model)
    matched: set[str] = set()
    for pattern in patterns:
        names = [name for name in known if _matches(name.split("."), pattern.split("."))]
        if not names:
            raise ConfigError(f"the model has no site '{pattern}' to capture{did_you_mean(pattern, known)}")
        matched.update(names)
    return [name for name in known if name in matched]


def _matches(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(map(fnmatchcase, name, pattern))


@contextmanager
def _watched(model: Transformer, names: set[str], found: dict[str, Tensor]) -> Generator[None, None, None]:
    """Hooks on the named modules that end with the context, whatever ends it."""
    with ExitStack() as stack:
        attention = stack.enter_context(_AttentionWeights(found))
        for name, module in model.named_modules():
            if name in names and name != "head":
                handle = module.register_forward_hook(partial(_keep_output, found, name))
                stack.callback(handle.remove)
            if name + _WEIGHTS in names:
                handle = module.register_forward_pre_hook(partial(attention.expect, name + _WEIGHTS))
                stack.callback(handle.remove)
        yield


def _keep_output(found: dict[str, Tensor], name: str, module: nn.Module, args: Any, output: Any) -> None:
    found[name] = output[0] if isinstance(output, tuple) else output


class _AttentionWeights(TorchFunctionMode):
    """Computes beside each awaited call of `scaled_dot_product_attention` the weights that it mixes values by."""

    def __init__(self, found: dict[str, Tensor]) -> None:
        super().__init__()
        self._found, self._awaited = found, ""

    def expect(self, name: str, module: nn.Module, args: Any) -> None:
        """The next call is that of the site `name`."""
        self._awaited = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self._awaited:
            self._found[self._awaited] = attention_weights(args[0], args[1], kwargs["attn_mask"], kwargs["scale"])
            self._awaited = ""
        return func(*args, **kwargs)


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """softmax(scale q k^T) over the keys that each query may see, in fp32, (B, heads, S, S).

    Args:
        q: (B, heads, S, d).
        k: (B, kv_heads, S, d), each shared by heads / kv_heads neighbouring query heads.
        mask: bool (1 or B, 1, S, S), of the keys that are seen; None = causal.
        scale: None = 1 / sqrt(d).
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q.float() @ k.float().mT
    scores = scores / q.shape[-1] ** 0.5 if scale is None else scores * scale
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)


def stream_to_safetensors(folder: Path, captured: Iterable[Mapping[str, Tensor]]) -> int:
    """Write each of many captures to a file of its own as it comes; one is in memory at a time.

    `index.jsonl` gets a line for every file that is complete: its name, and the shapes and dtypes by site.

    Args:
        captured: most simply `(capture(model, params, ids, sites) for ids in batches)`.

    Returns:
        The number of files.

    Raises:
        RunError: the folder has captures already, or cannot be written.
    """
    if (folder / INDEX).exists():
        raise RunError(f"{folder} has captures already: choose another folder, or remove it")
    source, count = iter(captured), 0
    while (found := next(source, None)) is not None:
        try:
            _write(folder, f"{count:05d}.safetensors", found)
        except OSError as error:
            raise RunError(f"{folder}: captures cannot be written ({error})") from None
        del found  # before the next one is made
        count += 1
    return count


def _write(folder: Path, name: str, found: Mapping[str, Tensor]) -> None:
    """A file that is there whole or not at all, then its line in the index."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {site: value.detach().cpu().clone(memory_format=torch.contiguous_format) for site, value in found.items()}
    replace_file(folder / name, save(own))
    sites = {
        site: {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        for site, value in own.items()
    }
    with (folder / INDEX).open("a", encoding="utf-8") as index:
        index.write(json.dumps({"file": name, "sites": sites}) + "\n")
