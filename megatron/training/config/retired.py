"""Flags of other names, most of older Megatron-LM releases, and the flags that replace them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Occurrence:
    """A flag on the command line, with the words that follow it."""

    spelling: str
    words: tuple[str, ...] = ()

    def as_words(self) -> list[str]:
        """Returns the words of a command line that give the flag."""
        if self.words and is_flag(self.words[0]):
            return [f"{self.spelling}={self.words[0]}", *self.words[1:]]
        return [self.spelling, *self.words]


def is_flag(word: str) -> bool:
    """Whether a word of a command line begins a flag. A value of this kind needs `--flag=word`."""
    return (word.startswith("--") and len(word) > 2) or word == "-h"


@dataclass(frozen=True)
class Translation:
    """The flags that replace a retired flag."""

    occurrences: tuple[Occurrence, ...]
    """Flags with the same meaning."""
    implied: tuple[Occurrence, ...]
    """Flags that it also sets unless the command line gives them."""
    warning: str
    """Line that tells the user."""


def translate_all(occurrences: list[Occurrence]) -> tuple[list[Occurrence], list[str]]:
    """Returns the command line with retired flags replaced, and a warning for each of them.

    Implied flags come first, so that a later flag on the command line overrides them.
    """
    implied: list[Occurrence] = []
    current: list[Occurrence] = []
    warnings: dict[str, None] = {}
    for occurrence in occurrences:
        translation = translate(occurrence)
        if translation is None:
            current.append(occurrence)
        else:
            implied += translation.implied
            current += translation.occurrences
            warnings[translation.warning] = None
    if any(occurrence.spelling == _POSITIONS for occurrence in current) and _NO_POSITIONS.warning in warnings:
        warnings = {_SAID_ELSEWHERE if line == _NO_POSITIONS.warning else line: None for line in warnings}
    return implied + current, list(warnings)


def translate(occurrence: Occurrence) -> Translation | None:
    """Returns the flags that replace a retired flag; None if the flag is not retired."""
    spelling, words = occurrence.spelling, occurrence.words
    if spelling in _FULL_RECOMPUTATION:
        method = Occurrence("--recompute-method", words or ("uniform",))
        return _becomes(occurrence, (_FULL, method), implied=(Occurrence("--recompute-num-layers", ("1",)),))
    if spelling == "--no-position-embedding":  # with --use-rotary-position-embeddings it means: no learned positions
        return _NO_POSITIONS
    if spelling == _GPT_OSS:
        return _becomes(occurrence, (), implied=_GPT_OSS_POSITIONS)
    if spelling == _QK_DECAY:
        return _becomes(occurrence, (Occurrence("--apply-wd-to-qk-layernorm", words if words != _QK_WORDS else ()),))
    if spelling == _DEEPSPEED and words:
        return _becomes(occurrence, (Occurrence("--deepspeed-config", words),))
    if spelling in _RENAMED:
        return _becomes(occurrence, (Occurrence(_RENAMED[spelling], words),))
    if spelling in _NOW:
        return _becomes(occurrence, (_NOW[spelling],))
    if spelling in _GONE:
        return Translation((), (), f"{text_of(occurrence)}: retired and ignored: {_GONE[spelling]}")
    return None


def _becomes(old: Occurrence, new: tuple[Occurrence, ...], implied: tuple[Occurrence, ...] = ()) -> Translation:
    why = "another name" if old.spelling in _OTHER_NAMES else "retired"
    return Translation(new, implied, f"{text_of(old)}: {why}; read as {' '.join(map(text_of, (*new, *implied)))}")


def text_of(occurrence: Occurrence) -> str:
    """Returns the flag and its words as they were written."""
    return " ".join((occurrence.spelling, *occurrence.words))


_OTHER_NAMES = frozenset(
    {
        "--dataloader-inter-document-masking",
        "--enable-gpt-oss",
        "--export-moe-apply-probs-on-input",
        "--export-qk-l2-norm",
        "--hybrid-override-pattern",
        "--no-yarn-correction-range-round-to-int",
        "--yarn-beta-fast",
        "--yarn-beta-slow",
        "--yarn-original-max-position-embeddings",
        "--yaml-cfg",
    }
)
"""Flags of today's Megatron-LM that have another name here."""

_POSITIONS = "--position-embedding-type"
_NO_POSITIONS = _becomes(Occurrence("--no-position-embedding"), (), implied=(Occurrence(_POSITIONS, ("none",)),))
_SAID_ELSEWHERE = f"--no-position-embedding: retired; {_POSITIONS} sets the positions"

_FULL_RECOMPUTATION = frozenset({"--activations-checkpoint-method", "--checkpoint-activations"})
_FULL = Occurrence("--recompute-granularity", ("full",))

_RENAMED = {
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--batch-size": "--micro-batch-size",
    "--checkpoint-num-layers": "--recompute-num-layers",
    "--activations-checkpoint-num-layers": "--recompute-num-layers",
    "--dataloader-inter-document-masking": "--reset-attention-mask",
    "--export-moe-apply-probs-on-input": "--moe-apply-probs-on-input",
    "--export-qk-l2-norm": "--qk-l2-norm",
    "--hybrid-override-pattern": "--hybrid-layer-pattern",
    "--no-yarn-correction-range-round-to-int": "--no-rope-scaling-truncate",
    "--yarn-beta-fast": "--rope-scaling-beta-fast",
    "--yarn-beta-slow": "--rope-scaling-beta-slow",
    "--yarn-original-max-position-embeddings": "--rope-scaling-original-length",
    "--yaml-cfg": "--config",
    "--fp32-allreduce": "--accumulate-allreduce-grads-in-fp32",
    "--distribute-checkpointed-activations": "--distribute-saved-activations",
    "--layernorm-epsilon": "--norm-epsilon",
    "--local_rank": "--local-rank",  # torch.distributed.launch of older releases of torch adds it
    "--s3-cache-path": "--object-storage-cache-path",
    "--use-custom-fsdp": "--use-megatron-fsdp",
    # releases before 0.5
    "--override-lr-scheduler": "--override-opt_param-scheduler",
    "--use-checkpoint-lr-scheduler": "--use-checkpoint-opt_param-scheduler",
}

_NOW = {
    "--use-rotary-position-embeddings": Occurrence("--position-embedding-type", ("rope",)),
    "--fp8-e4m3": Occurrence("--fp8-format", ("e4m3",)),
    "--fp8-hybrid": Occurrence("--fp8-format", ("hybrid",)),
}

_QK_DECAY, _QK_WORDS = "--no-weight-decay-cond-type", ("apply_wd_to_qk_layernorm",)
_GPT_OSS = "--enable-gpt-oss"
_GPT_OSS_POSITIONS = tuple(
    Occurrence(*words)
    for words in (
        ("--position-embedding-type", ("rope",)),
        ("--rope-scaling-type", ("yarn",)),
        ("--rope-scaling-factor", ("32",)),
        ("--rope-scaling-original-length", ("4096",)),
        ("--no-rope-scaling-truncate", ()),
    )
)
"""The rotary positions of gpt-oss, as its config.json has them."""

_DEEPSPEED = "--deepspeed"
"""Flag of DeepSpeed's launcher; in scripts of Transformers it has a file."""

_WHEN_REDUCED = "--overlap-grad-reduce reduces gradients while backward computes; the order changes no result"
_COLLECTIVES = "tokens of all ranks are computed together, and sent by collectives"
_SWAPS = "experts stay on their ranks: swapping them for a step gained 4% on two GPUs with uneven routing"
_GONE = {
    "--DDP-impl": "there is one data parallel implementation",
    "--data-impl": "indexed data files are mapped into memory",
    "--dataset-impl": "indexed data files are mapped into memory",
    "--mmap-warmup": "the operating system reads mapped files ahead",
    "--check-for-nan-in-loss-and-grad": "losses and gradients are checked without it",
    "--log-batch-size-to-tensorboard": "the batch size is always written to TensorBoard",
    "--no-contiguous-buffers-in-local-ddp": "gradients are always in contiguous buffers",
    "--no-scatter-gather-tensors-in-pipeline": "pipeline stages always send only what the next stage needs",
    _DEEPSPEED: "there is one way to train; --deepspeed-config FILE takes the settings of DeepSpeed",
    "--delay-grad-reduce": _WHEN_REDUCED,
    "--no-delay-grad-reduce": _WHEN_REDUCED,
    "--delay-param-gather": "--overlap-param-gather gathers the weights of each layer before its forward",
    "--enable-one-logger": "there is no such service; metrics go to metrics.jsonl and to TensorBoard",
    "--moe-balanced-expert-placement": _SWAPS,
    "--no-moe-balanced-expert-placement": _SWAPS,
    "--moe-local-token-overlap": _COLLECTIVES,
    "--no-moe-local-token-overlap": _COLLECTIVES,
    "--moe-dispatcher-transport": _COLLECTIVES,
    "--moe-flex-transport": _COLLECTIVES,
    "--moe-token-dropping": "it never had an effect; --moe-expert-capacity-factor lets experts drop tokens",
    "--no-log-learnig-rate-to-tensorboard": "the learning rate is always written to TensorBoard",
    "--no-query-key-layer-scaling": "scores are not divided by the number of the layer",
    "--scattered-embeddings": "--sequence-parallel scatters the output of the embedding",
    "--torch-compile": "our own kernels are faster than generated ones",
    "--torch-compile-backend": "our own kernels are faster than generated ones",
    "--split-transformers": "--sequence-parallel splits the activations between the parts of a layer",
}

REFUSED = {
    "--moe-router-topk-limited-devices": "retired: with it, a token's experts depend on the number of expert parallel "
    "ranks; give --moe-router-num-groups (that number) and --moe-router-group-topk (this value) instead",
    "--embedding-weights-in-fp32": "retired: --fp32-residual-connection keeps the output of the embedding in float32; "
    "gradients and main weights are float32 without it",
    "--renormalize-blend-weights": "retired: the weights of a blend are used as they are given, and another order of "
    "samples would follow from others; leave it out",
    "--standalone-embedding-stage": "retired: give --pipeline-model-parallel-layout, whose first stage may be the "
    "embedding alone, such as E|t*4|t*4|t*4L for four stages",
}
"""Flags of older releases that would change the result or the layout, and what to give instead."""

RETIRED = frozenset({"--no-position-embedding", _GPT_OSS, _QK_DECAY, *_FULL_RECOMPUTATION, *_RENAMED, *_NOW, *_GONE})
"""All flags that `translate` replaces."""
