"""Token data: a batch is a pure function of (config, step)."""

from forge.data.batch import IGNORE, Batch
from forge.data.batches import (
    EvalBatches,
    TokenDataset,
    build_batch_at,
    check_vocab,
    document_ids,
    eval_batches,
    n_samples,
    open_dataset,
    share_of,
)
from forge.data.manifest import FileEntry, Manifest, read_manifest
from forge.data.mixture import Mixture, build_mixture, shares_of
from forge.data.order import permuted, permuted_array
from forge.data.prefetch import prefetch
from forge.data.prepare import prepare, prepared
from forge.data.shard import Shard, open_npy, open_raw, open_shard
from forge.data.stream import IteratorStream, Position, Stream, StreamBatches, open_hub_stream
from forge.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, build_tokenizer
from forge.data.verify import verify
from forge.data.workers import available_cores
from forge.data.writer import write_shard

__all__ = [
    "IGNORE", "Batch", "ByteTokenizer", "EvalBatches", "FileEntry", "IteratorStream", "JsonTokenizer", "Manifest",
    "Mixture", "Position", "Shard", "Stream", "StreamBatches", "TokenDataset", "Tokenizer", "available_cores",
    "build_batch_at", "build_mixture", "build_tokenizer", "check_vocab", "document_ids", "eval_batches", "n_samples",
    "open_dataset", "open_hub_stream", "open_npy", "open_raw", "open_shard", "permuted", "permuted_array", "prefetch",
    "prepare", "prepared", "read_manifest", "share_of", "shares_of", "verify", "write_shard",
]  # fmt: skip
