"""A folder of a Hugging Face model -> a run's first checkpoint. One file's worth of weights is in memory at a time."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge.checkpoint.huggingface.config_json import load_config_json
from forge.checkpoint.huggingface.families import Family
from forge.checkpoint.huggingface.tensors import Origins, is_buffer, origins, to_family, to_forge, units
from forge.checkpoint.huggingface.tokenizer import TOKENIZER, copy_tokenizer
from forge.checkpoint.layout import PARAMS_PREFIX
from forge.checkpoint.load import opened
from forge.checkpoint.parameters import FILE_BYTES, check_no_run, split_by_size, write_start
from forge.checkpoint.save import writing
from forge.config import DataConfig, JobConfig, ModelConfig, TrainConfig
from forge.errors import CheckpointError
from forge.files import parse_json
from forge.model import build_model
from forge.training.runtime import DTYPES

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEAD = "lm_head.weight"
_FLOATS = ("F64", "F32", "F16", "BF16")


class Stored(NamedTuple):
    """A tensor in a file that is open."""

    reader: Any
    key: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' name

    def read(self) -> Tensor:
        """Its values."""
        return self.reader.get_tensor(self.key)


def import_folder(folder: Path, run_dir: Path, *, dtype: str = "keep") -> tuple[str, JobConfig]:
    """Make a run that starts from the weights of a Hugging Face model: its config, tokenizer and checkpoint of step 0.

    The checkpoint holds parameters only, so a training run may choose everything but the model and the dtype
    of its parameters.

    Args:
        dtype: of the stored parameters: keep | fp32 | bf16. What is neither is kept as fp32.

    Returns:
        The family, by the name that `transformers` has for it, and the run's config.

    Raises:
        ConfigError: names the key of config.json that forge cannot express.
        CheckpointError: files are missing, damaged or hold other tensors, or the run folder holds a run.
    """
    family, model = load_config_json(folder / "config.json")
    check_no_run(run_dir)
    meta = {name: p.detach() for name, p in build_model(model).named_parameters()}
    found = origins(family, meta)
    with open_weights(folder, family) as tensors:
        _check_weights(folder, family, model, tensors, to_family(found, meta))
        stored = {tensors[name].dtype for origin in found.values() for name in origin.tensors}
        kept = ("bf16" if stored == {"BF16"} else "fp32") if dtype == "keep" else dtype
        config = _run_config(run_dir, model, kept)
        if (folder / TOKENIZER).is_file():
            with writing(run_dir):
                copy_tokenizer(folder / TOKENIZER, Path(config.data.tokenizer).parent)
        write_start(run_dir, config, _converted(found, meta, tensors, DTYPES[kept]), str(folder))
    return family.model_type, config


def _run_config(run_dir: Path, model: ModelConfig, param_dtype: str) -> JobConfig:
    """The tokenizer is named whether there is one or not: with any other, the weights mean nothing."""
    train = TrainConfig(seq_len=min(1024, model.max_seq_len), param_dtype=param_dtype)  # type: ignore[arg-type]
    data = DataConfig(tokenizer=str(run_dir / "tokenizer" / TOKENIZER))
    return JobConfig(run_dir=str(run_dir), model=model, train=train, data=data)


@contextmanager
def open_weights(folder: Path, family: Family) -> Generator[dict[str, Stored], None, None]:
    """The tensors of a model's folder by name, constants left out; read while the folder is open.

    Raises:
        CheckpointError: there are no weights that forge reads, or a file is missing or damaged.
    """
    found: dict[str, Stored] = {}
    with ExitStack() as stack:
        for file in weight_files(folder):
            reader = stack.enter_context(opened(file))
            for key in reader.keys():  # noqa: SIM118
                header = reader.get_slice(key)
                found[key] = Stored(reader, key, tuple(header.get_shape()), header.get_dtype())
        bare = not any(name.startswith(family.prefix) for name in found)  # GPT-2's own file has no prefix

        def full(name: str) -> str:
            return family.prefix + name if bare and name != HEAD else name

        yield {full(name): tensor for name, tensor in found.items() if not is_buffer(full(name))}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder.

    Raises:
        CheckpointError: there are none; pickles are refused.
    """
    index = folder / INDEX
    if (folder / SINGLE).is_file() and not index.is_file():
        return [folder / SINGLE]
    if not index.is_file():
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        if pickles:
            raise CheckpointError(
                f"{folder / pickles[0]} is a pickle, which can run code, and forge does not read it: load the model"
                " with transformers and save_pretrained it, which writes safetensors"
            )
        raise CheckpointError(f"{folder}: no weights here: neither {SINGLE} nor {INDEX}")
    try:
        names = set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: damaged: {error!r}") from None
    strange = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if strange or not names:
        raise CheckpointError(f"{index}: damaged: {strange[:1] or 'nothing'} is no file of its folder")
    return [folder / name for name in sorted(names)]


def _check_weights(
    folder: Path, family: Family, model: ModelConfig, tensors: Mapping[str, Stored], expected: Mapping[str, Tensor]
) -> None:
    """Refuse a folder whose tensors are not exactly those that its config.json describes."""
    extra = [name for name in tensors if name not in expected]
    if model.tied_embeddings and HEAD in extra:
        _check_tied(folder, tensors[HEAD], tensors.get(f"{family.modules['embed'].name}.weight"))
        extra.remove(HEAD)
    wrong = [f"{name} is missing" for name in expected if name not in tensors]
    wrong += [f"{name} is not in forge's model" for name in extra]
    for name in expected.keys() & tensors.keys():
        shape, wanted, dtype = tensors[name].shape, tuple(expected[name].shape), tensors[name].dtype
        if shape != wanted:
            wrong.append(f"{name} is {shape}, config.json says {wanted}")
        if dtype not in _FLOATS:
            wrong.append(f"{name} is of dtype {dtype}, which forge does not train")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(f"{folder}: the weights do not fit: {'; '.join(wrong[:3])}{more}")


def _check_tied(folder: Path, head: Stored, embedding: Stored | None) -> None:
    if embedding is not None and not (head.shape == embedding.shape and head.read().equal(embedding.read())):
        raise CheckpointError(
            f"{folder}: config.json has tie_word_embeddings = true, but {HEAD} is no copy of the embedding"
        )


def _converted(
    found: Origins, meta: Mapping[str, Tensor], tensors: Mapping[str, Stored], dtype: torch.dtype
) -> Generator[dict[str, Tensor], None, None]:
    """forge's parameters, file by file, by path in the state."""
    groups = [(names, sum(meta[name].numel() * dtype.itemsize for name in names)) for names in units(found).values()]
    for group in split_by_size(groups, FILE_BYTES):
        names = [name for unit in group for name in unit]
        sources = {source: tensors[source].read() for name in names for source in found[name].tensors}
        yield {PARAMS_PREFIX + name: tensor.to(dtype) for name, tensor in to_forge(found, sources, names).items()}
