"""Converts models of the Hugging Face hub and runs of Megatron-LM to checkpoints of this project, and back.

python tools/checkpoint/convert.py import --hf-dir Qwen3-8B --save converted
python tools/checkpoint/convert.py export --load checkpoints --hf-dir my-model
python tools/checkpoint/convert.py export --load checkpoints --to-gguf my-model.gguf --gguf-type q8_0
python tools/checkpoint/convert.py import-megatron --load their-checkpoints --save converted [-- FLAGS OF THE RUN]
python tools/checkpoint/convert.py export-megatron --load checkpoints --save for-megatron-lm
python tools/checkpoint/convert.py --from their-checkpoints --to-hf my-model [-- FLAGS OF THE RUN]
python tools/checkpoint/convert.py --from-hf Qwen3-8B --to for-megatron-lm

The last two go from Megatron-LM to the hub and back in one command. No action needs a layout: any layout loads an
imported checkpoint, and an export reads checkpoints of any layout.
docs/checkpoints.md has examples, and lists the architectures that can be converted.
"""

import os
import sys

# Python must not search this folder for modules: it would take inspect.py for its own module of that name.
_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(os.path.dirname(_HERE)), *(path for path in sys.path if path != _HERE)]

import re  # noqa: E402
import shlex  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Literal  # noqa: E402

from megatron.interrupts import exit_quietly, run_main, tells_mistakes  # noqa: E402

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

import torch  # noqa: E402

from megatron.conversion.exporting import export_model  # noqa: E402
from megatron.conversion.families import FAMILIES  # noqa: E402
from megatron.conversion.fp8_folder import Granularity, write_fp8  # noqa: E402
from megatron.conversion.gguf import GgufType, check_target, write_gguf  # noqa: E402
from megatron.conversion.importing import FLAGS, import_model  # noqa: E402
from megatron.conversion.megatron_lm.exporting import ExportFormat, export_run  # noqa: E402
from megatron.conversion.megatron_lm.importing import import_run  # noqa: E402
from megatron.conversion.model_folder import refuse_used  # noqa: E402
from megatron.conversion.verification import Comparison  # noqa: E402
from megatron.core.declarations.config_fields import flag  # noqa: E402
from megatron.core.exceptions import UserError  # noqa: E402
from megatron.core.utils.store_path import local_folder, place  # noqa: E402
from megatron.training.config.tool_flags import Section, read_tool_flags  # noqa: E402
from tools.entry_scripts import build_model  # noqa: E402

PROGRAM = "python tools/checkpoint/convert.py"
KNOWN = ", ".join(family.architecture for family in FAMILIES)
ABOUT = f"Converts models between the Hugging Face hub's format and ours, bit for bit. Architectures: {KNOWN}."
ABOUT_DIRECT = "Converts a checkpoint of Megatron-LM to a folder of the Hugging Face hub, or such a folder to one."
ABOUT_MEGATRON = "Converts runs of Megatron-LM to checkpoints and back, bit for bit, without running their pickles."

Dtype = Literal["fp32", "bf16", "fp16", "fp64"]
Implementation = Literal["transformer_engine", "local"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
ACTIONS = ("import", "export", "import-megatron", "export-megatron")
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size_in_bytes(word: str) -> int:
    """Parses a size such as 5GB or 500MiB. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+)([A-Za-z]*)", word)
    if match is None or match[2] not in UNITS or int(match[1]) == 0:
        raise ValueError(f"not a size, such as 5GB ({', '.join(unit for unit in UNITS if unit)})")
    return int(match[1]) * UNITS[match[2]]


@dataclass(kw_only=True, frozen=True)
class ImportConfig:
    """Flags of an import."""

    hf_dir: str | None = None
    """Folder of the model, with config.json and safetensors files. Required."""

    save: str | None = None
    """Folder to write the checkpoint to, as in a run's --save. The checkpoint is named release. Required."""

    dtype: Dtype | None = None
    """Type of the weights. Default: weights keep their type."""

    file_size: int = flag(4 << 30, parse=size_in_bytes)
    """Approximate size of each file of the checkpoint. Default: 4GiB."""

    ignore_config_keys: list[str] | None = flag(None, nargs="+")
    """Keys of config.json to ignore. Without this, unknown keys are an error, since they may change the model."""

    verify: bool = False
    """Compare the checkpoint's logits with those of transformers, in float32 on the CPU. Needs transformers and memory
    for the model in float32. If the logits differ, nothing is imported."""


@dataclass(kw_only=True, frozen=True)
class ExportConfig:
    """Flags of an export."""

    load: str | None = None
    """Folder of checkpoints, as in a run's --save. Required."""

    ckpt_step: int | None = None
    """Iteration of the checkpoint. Default: the newest whole checkpoint."""

    hf_dir: str | None = None
    """Folder to write; it must be empty or not exist. Required without --to-gguf."""

    to_gguf: str | None = None
    """File to write for llama.cpp; it must not exist. Needs the package gguf."""

    gguf_type: GgufType = "f16"
    """Type of the matrices in the file of --to-gguf. Norms, biases and routers are float32."""

    fp8: Granularity | None = None
    """Write the linear weights of --hf-dir in fp8 (e4m3) with one scale per matrix, row or block of 128 by 128, for
    vLLM. Logits are compared before the weights are rounded."""

    architecture: str | None = None
    """Class of transformers to export as. Default: the first that supports the model."""

    dtype: Dtype | None = None
    """Type of the weights. Default: weights keep their type. A wider type takes the optimizer's main weights if the
    checkpoint has them."""

    max_shard_size: int = flag(5 * 10**9, parse=size_in_bytes)
    """Largest size of a safetensors file. Default: 5GB."""

    ema: bool = False
    """Export the moving average of the weights (--ema-decay of the run) in their place."""

    tokenizer_model: str | None = None
    """Folder to copy the tokenizer's files from. Default: the run's tokenizer."""

    spec: list[str] | None = flag(None, nargs="*")
    """Module and name of the layers, for a model that was trained with --spec. No code is taken from a checkpoint, so
    give it again."""

    verify: bool | None = flag(None, off="--no-verify")
    """Compare the logits of transformers, from the written files, with the checkpoint's, in float32 on the CPU. If they
    differ, nothing is exported. Needs transformers and memory for the model in float32. Default: compare where
    transformers is installed and half of the free memory is enough."""


@dataclass(kw_only=True, frozen=True)
class ImportMegatronConfig:
    """Flags of an import from Megatron-LM. Flags of the run, after `--`, replace those in the checkpoint."""

    load: str | None = None
    """Folder of Megatron-LM's checkpoints, as in its --save. Required."""

    ckpt_step: int | None = None
    """Iteration of the checkpoint. Default: the one that the tracker file names."""

    save: str | None = None
    """Folder to write the checkpoint to, as in a run's --save. Required."""

    no_load_optim: bool = False
    """Do not import main weights and moments."""

    file_size: int = flag(4 << 30, parse=size_in_bytes)
    """Approximate size of each file of the checkpoint. Default: 4GiB."""


@dataclass(kw_only=True, frozen=True)
class DirectConfig:
    """Flags of a conversion from Megatron-LM to the hub, or back. Flags of the run, after `--`, replace those in
    Megatron-LM's checkpoint."""

    from_megatron: str | None = flag(None, on="--from")
    """Folder of Megatron-LM's checkpoints, as in its --save. With --to-hf."""

    to_hf: str | None = None
    """Folder of the hub to write; it must be empty or not exist. With --from."""

    from_hf: str | None = None
    """Folder of the hub, with config.json and safetensors files. With --to."""

    to_megatron: str | None = flag(None, on="--to")
    """Folder of Megatron-LM to write, with a tracker file; it must be empty or not exist. With --from-hf."""

    ckpt_step: int | None = None
    """Iteration of the checkpoint of --from. Default: the one that the tracker file names."""

    architecture: str | None = None
    """Class of transformers to export as. Default: the first that supports the model."""

    dtype: Dtype | None = None
    """Type of the weights. Default: weights keep their type."""

    transformer_impl: Implementation = "transformer_engine"
    """Layers of Megatron-LM that load the result of --to; local: without Transformer Engine."""

    ckpt_format: ExportFormat = "torch_dist"
    """Format of the result of --to, as --ckpt-format there."""

    verify: bool | None = flag(None, off="--no-verify")
    """Compare the logits of transformers with those of the weights, in float32 on the CPU. If they differ, nothing is
    written. Default: --to-hf compares where transformers is installed and half of the free memory is enough, --from-hf
    does not."""


@dataclass(kw_only=True, frozen=True)
class ExportMegatronConfig:
    """Flags of an export to Megatron-LM."""

    load: str | None = None
    """Folder of checkpoints, as in a run's --save. Required."""

    ckpt_step: int | None = None
    """Iteration of the checkpoint. Default: the newest whole checkpoint."""

    save: str | None = None
    """Folder to write, with a tracker file; it must be empty or not exist. Required."""

    spec: list[str] | None = flag(None, nargs="*")
    """Module and name of the layers, for a model that was trained with --spec."""

    transformer_impl: Implementation = "transformer_engine"
    """Layers of Megatron-LM that load the result; local: without Transformer Engine. The names of some norms differ."""

    ckpt_format: ExportFormat = "torch_dist"
    """Format of the result, as --ckpt-format there. fsdp_dtensor is that of --use-megatron-fsdp, torch_dcp that of
    --use-torch-fsdp2."""


AnyConfig = ImportConfig | ExportConfig | ImportMegatronConfig | ExportMegatronConfig


def missing(config: AnyConfig, *names: str) -> list[str]:
    """Returns a problem for each of these flags that was not given."""
    return [f"{{{name}:name}} is required" for name in names if getattr(config, name) is None]


def mistargeted(config: ExportConfig) -> list[str]:
    """Returns a problem for each flag that an export lacks, or that does not apply to what it writes."""
    problems = missing(config, "load")
    if config.hf_dir is None and config.to_gguf is None:
        problems.append("{hf_dir:name} is required, or {to_gguf:name}")
    if config.fp8 is not None and (config.hf_dir is None or config.to_gguf is not None):
        problems.append("{fp8:name} is for {hf_dir:name} without {to_gguf:name}, whose types {gguf_type:name} names")
    return problems


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["import"]:
        section = Section("import", ImportConfig, lambda config: missing(config, "hf_dir", "save"))
        run_import(read_tool_flags(words[1:], [section], f"{PROGRAM} import [flags]", ABOUT)[0])
    elif words[:1] == ["export"]:
        section = Section("export", ExportConfig, mistargeted)
        run_export(read_tool_flags(words[1:], [section], f"{PROGRAM} export [flags]", ABOUT)[0])
    elif words[:1] == ["import-megatron"]:
        cut = words.index("--") if "--" in words else len(words)
        section = Section("import-megatron", ImportMegatronConfig, lambda config: missing(config, "load", "save"))
        usage = f"{PROGRAM} import-megatron [flags] [-- flags of the run]"
        own = read_tool_flags(words[1:cut], [section], usage, ABOUT_MEGATRON)[0]
        run_import_megatron(own, words[cut + 1 :])
    elif words[:1] == ["export-megatron"]:
        exporting = Section("export-megatron", ExportMegatronConfig, lambda config: missing(config, "load", "save"))
        usage = f"{PROGRAM} export-megatron [flags]"
        run_export_megatron(read_tool_flags(words[1:], [exporting], usage, ABOUT_MEGATRON)[0])
    elif words[:1] in (["--help"], ["-h"]):
        actions = "|".join(ACTIONS)
        print(
            f"usage: {PROGRAM} {actions} [flags]\n       {PROGRAM} --from DIR --to-hf DIR [flags]\n"
            f"       {PROGRAM} --from-hf DIR --to DIR [flags]\n\n{ABOUT}\n{ABOUT_MEGATRON}\n\n"
            "ACTION --help and --from --help list their flags"
        )
    elif words and words[0].startswith("--"):
        cut = words.index("--") if "--" in words else len(words)
        direct = Section("convert", DirectConfig, lambda config: mispaired(config, words[cut + 1 :]))
        own = read_tool_flags(words[:cut], [direct], f"{PROGRAM} [flags] [-- flags of the run]", ABOUT_DIRECT)
        run_direct(own[0], words[cut + 1 :])
    else:
        other = f", not {words[0]}" if words else ""
        raise UserError(f"the first word must be one of {', '.join(ACTIONS)}, --from, --from-hf{other}")
    return 0


def mispaired(config: DirectConfig, flags: Sequence[str]) -> list[str]:
    """Returns a problem unless the flags name one way with both of its ends, and one for each flag of the other way."""
    ends = [config.from_megatron, config.to_hf, config.from_hf, config.to_megatron]
    given = [end is not None for end in ends]
    if given == [True, True, False, False]:
        defaults = DirectConfig()
        others = [
            name for name in ("transformer_impl", "ckpt_format") if getattr(config, name) != getattr(defaults, name)
        ]
        return [f"{{{name}:name}} is for {{to_megatron:name}}" for name in others]
    if given == [False, False, True, True]:
        others = [name for name in ("ckpt_step", "architecture") if getattr(config, name) is not None]
        problems = [f"{{{name}:name}} is for {{from_megatron:name}}" for name in others]
        return problems + (["flags after -- are for {from_megatron:name}"] if flags else [])
    return ["give {from_megatron:name} with {to_hf:name}, or {from_hf:name} with {to_megatron:name}"]


def check_empty(target: Path) -> None:
    """Raises UserError unless a folder can be written there."""
    if not target.absolute().parent.is_dir():
        raise UserError(f"{target}: there is no folder {target.parent}")
    refuse_used(target)


def run_direct(config: DirectConfig, flags: Sequence[str]) -> None:
    """Converts through a checkpoint of ours, in a temporary folder beside the result."""
    target = Path(config.to_hf or config.to_megatron or "")
    check_empty(target)
    place = tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=f".{target.name}-")
    with place as name:
        between = Path(name) / "checkpoint"
        if config.from_hf is not None:
            hub, dtype = Path(config.from_hf), DTYPES[config.dtype] if config.dtype else None
            print_comparison(
                import_model(hub, between, build_model, dtype=dtype, verify=bool(config.verify)).comparison
            )
            written = ExportMegatronConfig(
                load=str(between),
                save=str(target),
                transformer_impl=config.transformer_impl,
                ckpt_format=config.ckpt_format,
            )
            run_export_megatron(written, hub if (between / "tokenizer").exists() else None)
            return
        widens = config.dtype is not None  # a wider type takes the main weights
        source, step = Path(config.from_megatron or ""), config.ckpt_step
        import_run(source, between, build_model, step=step, flags=flags, with_optimizer=widens)
        exported = ExportConfig(
            load=str(between),
            hf_dir=str(target),
            architecture=config.architecture,
            dtype=config.dtype,
            verify=config.verify,
        )
        run_export(exported)


def run_import(config: ImportConfig) -> None:
    """Imports a model, and prints the flags to train it with."""
    root = local_folder("--save", config.save or "")
    done = import_model(
        Path(config.hf_dir or ""),
        root,
        build_model,
        dtype=DTYPES[config.dtype] if config.dtype else None,
        file_bytes=config.file_size,
        ignored_keys=config.ignore_config_keys or (),
        verify=config.verify,
    )
    print(f"{done.saved.folder}: {done.saved.nbytes / 1e6:.1f} MB in {done.saved.seconds:.1f} s")
    print_comparison(done.comparison)
    print(f"flags of the model, in {root / FLAGS}:\n  {shlex.join(done.flags)}")
    run = f"--config {root / FLAGS}, --pretrained-checkpoint {root} and the flags of a run, in any layout"
    print(f"to train it, give pretrain_{done.model_family}.py {run}")


def run_export(config: ExportConfig) -> None:
    """Exports a model as a folder, as a GGUF file or as both, and prints its architecture."""
    final = Path(config.hf_dir or config.to_gguf or "")
    if config.to_gguf is not None:
        check_target(Path(config.to_gguf))
    if config.to_gguf is None and config.fp8 is None:
        export_folder(config, final)
        return
    check_empty(final)
    with tempfile.TemporaryDirectory(dir=final.absolute().parent, prefix=f".{final.name}-") as name:
        is_kept = config.fp8 is None and config.hf_dir is not None
        folder = final if is_kept else Path(name) / "model"
        export_folder(config, folder)
        if config.fp8 is not None:
            fp8 = write_fp8(folder, final, config.fp8)
            print(f"{final}: {fp8.num_quantized} matrices in fp8, {fp8.nbytes / 1e6:.1f} MB")
        if config.to_gguf is not None:
            file = write_gguf(folder, Path(config.to_gguf), config.gguf_type)
            print(f"{config.to_gguf}: {file.architecture}, {file.num_tensors} tensors, {file.nbytes / 1e6:.1f} MB")


def export_folder(config: ExportConfig, target: Path) -> None:
    """Exports a model as a folder, and prints its architecture."""
    done = export_model(
        place(config.load or ""),
        target,
        build_model,
        step=config.ckpt_step,
        architecture=config.architecture,
        dtype=DTYPES[config.dtype] if config.dtype else None,
        shard_bytes=config.max_shard_size,
        tokenizer=Path(config.tokenizer_model) if config.tokenizer_model else None,
        verify=config.verify,
        spec=config.spec,
        average=config.ema,
    )
    print(f"{target}: {done.architecture}, {done.nbytes / 1e6:.1f} MB in {len(done.files)} files")
    print_comparison(done.comparison)


def run_import_megatron(config: ImportMegatronConfig, flags: Sequence[str]) -> None:
    """Imports a run of Megatron-LM, and prints its iteration and how to continue."""
    root = local_folder("--save", config.save or "")
    done = import_run(
        place(config.load or ""),
        root,
        build_model,
        step=config.ckpt_step,
        flags=flags,
        with_optimizer=not config.no_load_optim,
        file_bytes=config.file_size,
    )
    print(f"{done.saved.folder}: {done.saved.nbytes / 1e6:.1f} MB in {done.saved.seconds:.1f} s")
    print(f"flags of the run, in {root / FLAGS}:\n  {shlex.join(done.flags)}")
    if done.state is None:
        run = f"--config {root / FLAGS}, --pretrained-checkpoint {root} and the flags of a run, in any layout"
        print(f"to train it, give {run}")
    else:
        at = f"iteration {done.state.iteration}, sample {done.state.consumed_train_samples}"
        print(f"the run continues at {at}: give --config {root / FLAGS} and --load {root}, in any layout")


def run_export_megatron(config: ExportMegatronConfig, tokenizer: Path | None = None) -> None:
    """Exports a run to Megatron-LM, with another path of its tokenizer if one is given."""
    is_local = config.transformer_impl == "local"
    target = local_folder("--save", config.save or "")
    source, step, spec = place(config.load or ""), config.ckpt_step, config.spec
    kind = config.ckpt_format
    done = export_run(source, target, step=step, spec=spec, is_local=is_local, ckpt_format=kind, tokenizer=tokenizer)
    what = "with optimizer state" if done.with_optimizer else "weights only"
    print(f"{done.folder}: {done.nbytes / 1e6:.1f} MB, {what}, in the format {kind}")


def print_comparison(comparison: Comparison | None) -> None:
    """Prints the result of --verify, if it was given."""
    if comparison is not None:
        print(
            f"verified: transformers computes the same logits for {comparison.rows} rows of {comparison.length} random "
            f"tokens; the largest difference is {comparison.difference:.1g} standard deviations of the logits"
        )


if __name__ == "__main__":
    run_main(main)
