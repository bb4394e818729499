"""A checkpoint on the tasks of lm-evaluation-harness (Gao et al. 2024), through its Python API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.func import functional_call

from forge.data import Tokenizer, build_tokenizer
from forge.distributed.launch import find_launch
from forge.errors import ConfigError, RunError, did_you_mean
from forge.model import build_model
from forge.model.block import BlockOutput
from forge.model.head import head_logits
from forge.model.moe import without_capacity
from forge.training.extras import router_bias
from forge.training.generate import Sampling
from forge.training.reload import Device, Trained, open_run
from forge.training.samples import sample_texts

ROWS = 8
"""Texts that are read side by side."""
NEW_TOKENS = 256
"""Most tokens of a continuation where a task does not say: lm-eval's own number."""


@frozen
class Window:
    """Tokens to read at once, of which the last ones are scored."""

    text: int  # number of the text that it belongs to
    inputs: tuple[int, ...]
    targets: tuple[int, ...]  # what follows each of the last inputs


@frozen
class TaskResults:
    """What a checkpoint reached."""

    step: int
    metrics: dict[str, dict[str, float]]  # by task: "acc", "acc_norm", ...; "acc:strict" where a filter has a name
    samples: dict[str, int]  # documents of each task


def split_continuation(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Ids of a context and of what continues it, as lm-eval's own models cut them.

    Spaces at the end of the context go to the continuation, both are encoded as one text, and the end of a document
    stands before a continuation of nothing.
    """
    kept = context.rstrip()
    whole, head = tokenizer.encode(context + continuation).tolist(), tokenizer.encode(kept).tolist()
    return (head, whole[len(head) :]) if head else ([tokenizer.eod_id], whole)


def windows(text: int, context: Sequence[int], continuation: Sequence[int], longest: int) -> Iterator[Window]:
    """Cut a text so that each token of the continuation is predicted once, after as many tokens as there is room for.

    Args:
        context: at least one token.
        longest: most tokens that the model can look at.
    """
    tokens = (*context, *continuation)
    for start in range(len(context), len(tokens), longest):
        end = min(start + longest, len(tokens))
        yield Window(text, tokens[max(0, end - 1 - longest) : end - 1], tokens[start:end])


@frozen
class Scorer:
    """How likely a checkpoint finds texts, and how it continues them."""

    trained: Trained
    tokenizer: Tokenizer

    @torch.no_grad()
    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """Of each (context, continuation) the log-likelihood in nats, and whether each token was the likeliest one.

        Raises:
            RunError: a token beyond the model's vocabulary.
        """
        self._check_vocabulary(pairs)
        longest = self.trained.config.model.max_seq_len
        cut = [window for text, pair in enumerate(pairs) for window in windows(text, *pair, longest)]
        cut.sort(key=lambda window: -len(window.inputs))
        sums, greedy = [0.0] * len(pairs), [True] * len(pairs)
        model, dtype = build_model(self.trained.config.model), self.trained.parts.runtime.compute_dtype
        params = {name: p.to(dtype) for name, p in self.trained.params().items()}
        with without_capacity(model):  # what a text gets must not depend on the others
            for start in range(0, len(cut), ROWS):
                side_by_side = cut[start : start + ROWS]
                for window, (total, best) in zip(side_by_side, self._read(model, params, side_by_side), strict=True):
                    sums[window.text] += total
                    greedy[window.text] &= best
        return list(zip(sums, greedy, strict=True))

    def _read(self, model: Any, params: dict[str, Tensor], rows: Sequence[Window]) -> list[tuple[float, bool]]:
        """Shorter rows are filled up behind their end, where no token looks."""
        config, device = self.trained.config.model, self.trained.parts.runtime.device
        ids = torch.zeros(len(rows), max(len(row.inputs) for row in rows), dtype=torch.int64)
        for place, row in enumerate(rows):
            ids[place, : len(row.inputs)] = torch.tensor(row.inputs)

        def output(hidden: Tensor, weight: Tensor, _: list[BlockOutput]) -> list[tuple[float, bool]]:
            found = []
            for row, states in zip(rows, hidden, strict=True):  # one by one: logits of all are large
                scored = states[len(row.inputs) - len(row.targets) : len(row.inputs)]
                chances = head_logits(scored, weight, config.logit_softcap).log_softmax(dim=-1)
                targets = torch.tensor(row.targets, device=device)
                total = chances.gather(-1, targets.unsqueeze(-1)).double().sum()
                found.append((float(total), bool((chances.argmax(dim=-1) == targets).all())))
            return found

        extras = router_bias(self.trained.state.extras)
        result: list[tuple[float, bool]] = functional_call(
            model, params, (ids.to(device),), {"output": output, **extras}
        )
        return result

    def _check_vocabulary(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        size = self.trained.config.model.vocab_size
        for token in (token for pair in pairs for part in pair for token in part):
            if token >= size:
                raise RunError(f"a task has token {token}, beyond model.vocab_size = {size}: give the run's tokenizer")

    def continue_texts(self, prompts: Sequence[str], options: dict[str, Any]) -> list[str]:
        """What follows each prompt.

        Args:
            options: lm-eval's: until, max_gen_toks, do_sample, temperature, top_k, top_p.
        """
        until = options.get("until") or []
        drawn = options.get("do_sample", False)
        sampling = Sampling(
            temperature=float(options.get("temperature", 1.0)) if drawn else 0.0,
            top_k=options.get("top_k") if drawn else None,
            top_p=options.get("top_p") if drawn else None,
        )
        trained, made = self.trained, []
        for start in range(0, len(prompts), ROWS):
            made += sample_texts(
                trained.config, trained.parts, trained.params(), trained.state.extras, self.tokenizer,
                prompts[start : start + ROWS], sampling, max_new_tokens=int(options.get("max_gen_toks", NEW_TOKENS)),
                stop=[until] if isinstance(until, str) else [word for word in until if word],
            )  # fmt: skip
        return [sample.continuation for sample in made]


def evaluate_tasks(
    run_dir: str, names: Sequence[str], *, step: int = -1, device: Device = "auto", folder: str = ""
) -> TaskResults:
    """Evaluate a run's checkpoint on tasks of lm-evaluation-harness, in this process alone.

    lm-eval seeds the global random generators of Python, numpy and torch, which nothing of forge draws from.

    Args:
        folder: of YAML files of further tasks.

    Raises:
        ConfigError: lm-eval is not installed, or a task is not known.
        RunError: on several processes, or a task whose data cannot be had.
    """
    if find_launch().world_size > 1:
        raise RunError("--tasks is for one process: leave out torchrun")
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ConfigError("--tasks needs lm-evaluation-harness: pip install lm-eval") from None
    manager = TaskManager(include_path=folder or None)
    for name in names:
        if name not in manager.all_tasks:
            raise ConfigError(f"--tasks {name}: no such task{did_you_mean(name, manager.all_tasks)}")
    with open_run(run_dir, step=step, device=device) as trained:
        scorer = Scorer(trained, build_tokenizer(trained.config.data.tokenizer))
        try:
            found = lm_eval.simple_evaluate(
                model=build_lm(scorer), tasks=list(names), task_manager=manager, bootstrap_iters=0, log_samples=False
            )
        except OSError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RunError(f"--tasks {','.join(names)}: the data cannot be had ({reason})") from None
        return TaskResults(int(trained.state.step), *_numbers(found))


def _numbers(found: Any) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    """lm-eval's "acc,none" as "acc", "acc,strict" as "acc:strict"; errors and names are left out."""
    metrics = {}
    for task, values in found["results"].items():
        kept = {key: value for key, value in values.items() if "," in key and "_stderr" not in key}
        kept = {key.removesuffix(",none").replace(",", ":"): float(value) for key, value in kept.items()}
        metrics[task] = kept
    samples = {task: int(counts["effective"]) for task, counts in found["n-samples"].items()}
    return metrics, samples


def build_lm(scorer: Scorer) -> Any:
    """The scorer as what lm-eval evaluates; an `lm_eval.api.model.LM`."""
    from lm_eval.api.model import LM

    class ForgeLM(LM):
        def loglikelihood(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return scorer.score([split_continuation(scorer.tokenizer, *request.args) for request in requests])

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
            texts = [split_continuation(scorer.tokenizer, "", request.args[0]) for request in requests]
            return [total for total, _ in scorer.score(texts)]

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            made = [""] * len(requests)
            asked = [(place, *request.args) for place, request in enumerate(requests)]
            for options in {repr(options): options for _, _, options in asked}.values():
                alike = [(place, prompt) for place, prompt, theirs in asked if theirs == options]
                texts = scorer.continue_texts([prompt for _, prompt in alike], options)
                for (place, _prompt), text in zip(alike, texts, strict=True):
                    made[place] = text
            return made

    return ForgeLM()


def format_tasks(run_dir: str, found: TaskResults) -> str:
    """A line a task."""
    lines = []
    for task, metrics in found.metrics.items():
        numbers = " | ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        count = f" | {found.samples[task]} documents" if task in found.samples else ""
        lines.append(f"{run_dir} step {found.step}: {task}: {numbers}{count}")
    return "\n".join(lines)
