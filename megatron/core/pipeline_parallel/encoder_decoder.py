"""Checks a config that divides an encoder and a decoder into pipeline stages."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.core.declarations.config_fields import literal_text
from megatron.core.pipeline_parallel.stages import AUTO, counted_as_layers, decoder_stage, layout_of, num_encoder_layers

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def encoder_decoder_problems(config: "TransformerConfig") -> Iterator[str]:
    """Yields a problem for each reason why an encoder and a decoder cannot be divided into pipeline stages."""
    if (config.virtual_pipeline_model_parallel_size or 1) > 1 or config.pipeline_schedule in ("interleaved", "zb-v"):
        several = "{virtual_pipeline_model_parallel_size}"
        if (config.virtual_pipeline_model_parallel_size or 1) == 1:
            several = "{pipeline_schedule}"
        yield f"{several}: an encoder and a decoder have one stage on each rank; leave it out"
        return
    if config.pipeline_model_parallel_size == 1:
        return
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if getattr(config, name) is not None:
            yield (
                f"{{{name}}}: to divide an encoder and a decoder unevenly, give {{pipeline_model_parallel_layout:name}}"
            )
    if counted_as_layers(config):
        yield (
            "{account_for_embedding_in_pipeline_split:name} and {account_for_loss_in_pipeline_split:name} do not go "
            "with an encoder and a decoder; {pipeline_model_parallel_layout:name} auto weighs both"
        )
    size, split = config.pipeline_model_parallel_size, config.pipeline_model_parallel_split_rank
    if split is not None and not 1 <= split < size:
        yield (
            "{pipeline_model_parallel_split_rank}: the encoder and the decoder need a stage each; it must be from 1 to "
            f"{size - 1}"
        )
        return
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        if layout != AUTO:
            yield from _two_stack_layout_problems(config)
        return
    first = decoder_stage(config)
    assert first is not None
    for stack, layers, stages in (
        ("encoder", num_encoder_layers(config), first),
        ("decoder", config.num_layers, size - first),
    ):
        if layers % stages:
            below = layers // stages * stages
            near = f"{below} or {below + stages}" if below else f"{stages}"
            yield (
                f"{layers} layers of the {stack} are not divisible by its {stages} pipeline stages; use {near} layers, "
                "or divide them otherwise with {pipeline_model_parallel_split_rank:name} or "
                "{pipeline_model_parallel_layout:name}"
            )


def _two_stack_layout_problems(config: "TransformerConfig") -> Iterator[str]:
    complaint = "{pipeline_model_parallel_layout}"
    try:
        stages = layout_of(config)
    except ValueError as error:
        yield f"{complaint}: {literal_text(str(error))}"
        return
    assert stages is not None
    size = config.pipeline_model_parallel_size
    if len(stages) != size:
        yield f"{complaint} has {len(stages)} stages for {{pipeline_model_parallel_size}}; give {size}"
        return
    letters = "".join(stages)
    starts = [stage for stage, contents in enumerate(stages) if contents.startswith("E")]
    if letters.count("E") != 2 or len(starts) != 2 or starts[0] != 0:
        yield (
            f"{complaint}: an encoder and a decoder each begin a stage with E, the embedding, such as Et*6|Et*6L for "
            "two ranks"
        )
        return
    split = config.pipeline_model_parallel_split_rank
    if split not in (None, starts[1]):
        yield f"{{pipeline_model_parallel_split_rank}}: {complaint} begins the decoder on stage {starts[1]}"
    if letters.count("L") != 1 or not stages[-1].endswith("L"):
        yield f"{complaint} must end with L, the loss, on its last stage and contain no other L"
    encoder = "".join(stages[: starts[1]]).count("t")
    for stack, found, wanted in (
        ("encoder", encoder, num_encoder_layers(config)),
        ("decoder", letters.count("t") - encoder, config.num_layers),
    ):
        if found != wanted:
            yield f"{complaint} has {found} layers of the {stack}, which has {wanted}"
    if "m" in letters:
        yield f"{complaint}: an encoder and a decoder have no multi-token prediction layers (m)"
