"""What --dry-run prints: each kind of rank, the peak and ways out, and model parts by rank."""

import dataclasses
import re
import time

import pytest
from support.command_lines import SMALL, configured

from megatron.core.pipeline_parallel.stage_map import StageModules, stage_text
from megatron.diagnosis.dry_run import report as report_module
from megatron.diagnosis.dry_run.dry_run import dry_run
from megatron.diagnosis.dry_run.report import print_dry_run, report_lines, short_size, size_text, way_lines
from megatron.training.providers import Context, ForwardStep, Providers
from pretrain_gpt import build_forward_step, build_model

PROVIDERS = Providers(build_model, lambda context, counts: [], lambda context: lambda data, model: None)  # type: ignore[arg-type,return-value]
TRAINS = dataclasses.replace(PROVIDERS, build_forward_step=build_forward_step)
MEGATRON_LM = (
    "--dry-run --tokenizer-type NullTokenizer --vocab-size 50257 --tensor-model-parallel-size 4 "
    "--pipeline-model-parallel-size 4 --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
    "--micro-batch-size 2 --global-batch-size 1024 --seq-length 4096"
)


def report(flags: str = "", base: str = MEGATRON_LM, ranks: int = 128) -> list[str]:
    config = configured(flags, base=base, ranks=ranks)
    return list(report_lines(config, dry_run(config, PROVIDERS)))


def rows_of_ranks(lines: list[str]) -> list[list[str]]:
    """The cells of the table of kinds of ranks, without its titles."""
    first = next(number for number, line in enumerate(lines) if line.startswith("memory of each kind of rank")) + 2
    return [re.split(r"\s{2,}", line.strip()) for line in lines[first : lines.index("", first)]]


def test_a_dry_run_of_128_ranks() -> None:
    """A layer of h = 4096 has 12 h^2 + 13 h parameters, of which 8 h are on every tensor parallel rank."""
    started = time.process_time()
    lines = report()
    assert time.process_time() - started < 60
    rows = rows_of_ranks(lines)
    assert [row[:3] for row in rows] == [
        ["0 to 31", "32", "0"],
        ["32 to 63", "32", "1"],
        ["64 to 95", "32", "2"],
        ["96 to 127", "32", "3"],
    ]
    h = 4096
    layer = (12 * h * h + (3 + 4) * h) // 4 + 6 * h
    vocabulary = 12672  # padded to 50,688, a quarter each
    for pp, row in enumerate(rows):
        parameters, weights, gradients, optimizer, total = (int(word.replace(",", "")) for word in row[3:8])
        ends = {0: vocabulary * h + 4096 * h, 3: vocabulary * h + 2 * h}
        assert parameters == 8 * layer + ends.get(pp, 0)
        assert weights == gradients == 4 * parameters and optimizer == 8 * parameters and total == 16 * parameters
        layers = f"layers {8 * pp + 1} to {8 * pp + 8}"
        assert row[-1] == {0: f"embedding, {layers}", 3: f"{layers}, head and loss"}.get(pp, layers)
    text = "\n".join(lines)
    assert "ranks       128 = tensor 4 x pipeline 4 x context 1 x data 8" in text
    assert "parameters  6,666,797,056; vocabulary 50,258, stored as 50,688" in text


def test_offloaded_activations_are_in_host_memory() -> None:
    """Queries, keys and values of a layer share 192 KiB, for which torch's allocator takes 256 KiB. The first of two
    pipeline ranks keeps two micro-batches."""
    cores = "--fine-grained-activation-offloading --offload-modules core_attn --min-offloaded-tensor-size 1"
    flags = f"{cores} --pipeline-model-parallel-size 2 --global-batch-size 8"

    def lines(flags: str, ranks: int) -> list[str]:
        config = configured(flags, ranks=ranks)
        return [line for line in report_lines(config, dry_run(config, TRAINS)) if line.startswith("host memory")]

    assert lines(cores, 1) == ["host memory 512.00 KiB (524,288 bytes): offloaded activations, page-locked"]
    assert lines(flags, 2) == ["host memory 512.00 KiB (524,288 bytes) on rank 0: offloaded activations, page-locked"]
    by_layer = lines("--cpu-offloading-num-layers 1 --optimizer-cpu-offload", 1)
    assert [line.partition(": ")[2] for line in by_layer] == ["optimizer state", "offloaded activations, page-locked"]
    assert lines("", 1) == []


def test_files_of_weights_and_state() -> None:
    flags = "--bf16 --use-torch-fsdp2 --optimizer-cpu-offload --param-nvme-offload-path /weights"

    def places(more: str = "") -> list[str]:
        lines = report(f"{flags} {more}", base=SMALL, ranks=4)
        found = [re.sub(" +", " ", each) for each in lines if each.startswith(("file", "host"))]
        found = [re.sub(r"\d.* on each rank", "SIZE", each) for each in found]
        return [re.sub(r": 0\.\d+ s at", ": TIME at", each) for each in found]

    time_of_a_file = "TIME at 1 GB/s for each rank in each step"
    assert places() == [
        f"file SIZE of weights in /weights: {time_of_a_file}",
        "host memory SIZE: optimizer state, buffers for the weights in the file",
    ]
    assert places("--optimizer-nvme-offload-path /state") == [
        f"file SIZE of optimizer state in /state: {time_of_a_file}",
        f"file SIZE of weights in /weights: {time_of_a_file}",
        "host memory SIZE: buffers for the optimizer state in the file, buffers for the weights in the file",
    ]


def test_the_peak_of_each_kind_of_rank() -> None:
    config = configured("--pipeline-model-parallel-size 2", base=SMALL, ranks=4)
    run = dry_run(config, TRAINS)
    lines = list(report_lines(config, run))
    first, last = rows_of_ranks(lines)
    assert (first[0], last[0]) == ("0, 1", "2, 3")
    for row, peak in zip((first, last), run.peaks, strict=True):
        numbers = [int(word.replace(",", "")) for word in row[-5:-1]]
        assert numbers == [peak.activations, peak.logits, peak.buffers, peak.allocated]
    assert run.peaks[0].logits == 0 < run.peaks[1].logits
    (told,) = (line for line in lines if line.startswith("peak        "))
    fullest = max(run.peaks, key=lambda peak: peak.allocated)
    assert f"{short_size(fullest.allocated)} allocated in a step on rank {fullest.rank} and 1 like it" in told


def test_a_model_that_cannot_be_counted_is_told() -> None:
    def reads_values(context: Context) -> ForwardStep:
        raise ValueError("reads values\nof tensors")

    run = dry_run(configured(), dataclasses.replace(TRAINS, build_forward_step=reads_values))
    lines = list(report_lines(run.config, run))
    assert "peak        activations are extra, and are not counted here: ValueError: reads values" in lines
    assert list(way_lines(run, TRAINS)) == []


def test_three_ways_to_take_less() -> None:
    run = dry_run(configured("--micro-batch-size 4", ranks=2), TRAINS)
    title, *ways = way_lines(run, TRAINS)
    assert title == "to take less memory:" and len(ways) == 3
    assert any(re.fullmatch(r"  --micro-batch-size 2: [\d.]+ MiB less, costs no more work", way) for way in ways)


def test_the_map_says_who_holds_what() -> None:
    lines = report("--num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer --bf16")
    shown = lines[lines.index("model parts by rank") :]
    assert "  stage 0 = chunk 0 of pipeline rank 0: embedding, layers 1 to 4" in shown
    assert "  stage 5 = chunk 1 of pipeline rank 1: layers 21 to 24" in shown
    assert "  stage 7 = chunk 1 of pipeline rank 3: layers 29 to 32, head and loss" in shown
    row = next(line for line in shown if line.strip().startswith("pp 1"))
    assert re.split(r"\s{2,}", row.strip()) == ["pp 1", *(f"{32 + tp} to {60 + tp} by 4" for tp in range(4))]
    parts = shown.index("  split over tensor parallel ranks:")
    copies = shown.index("  whole on each of these ranks:")
    assert "    embedding.word_embeddings.weight  50258 x 4096" in shown[parts:copies]
    assert "    decoder.layers.*.mlp.linear_fc1.weight  16384 x 4096" in shown[parts:copies]
    assert "    decoder.layers.*.input_layernorm.weight  4096" in shown[copies:]
    assert (
        "  copies of one weight, whose gradients are summed: embedding.word_embeddings.weight on pipeline ranks 0, 3"
        in shown
    )
    assert shown[-1] == (
        "  data parallel ranks shard the optimizer's state of each layer, the embedding and the head in 8 equal "
        "parts, such as ranks 0 to 28 by 4"
    )


def test_the_map_says_who_holds_which_experts() -> None:
    small = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --mock-data "
    small += (
        "--tokenizer-type NullTokenizer --vocab-size 50 --lr 1 --train-iters 1 --num-experts 8 --sequence-parallel "
    )
    small += "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
    lines = report("", base=small, ranks=8)
    shown = lines[lines.index("model parts by rank") :]
    experts = next(number for number, line in enumerate(shown) if line.strip().startswith("experts"))
    assert re.split(r"\s{2,}", shown[experts + 1].strip()) == ["pp 0", "0, 4", "1, 5", "2, 6", "3, 7"]
    first = shown.index("  experts split over expert parallel ranks:")
    assert (
        "    decoder.layers.*.mlp.experts.linear_fc2.weight  8 x 64 x 256"
        in shown[first : shown.index("  whole on each of these ranks:")]
    )
    assert "    decoder.layers.*.mlp.router.weight  8 x 64" in shown[shown.index("  whole on each of these ranks:") :]


def test_chunks_of_a_v_shaped_pipeline_lie_on_one_rank() -> None:
    small = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --mock-data "
    small += "--tokenizer-type NullTokenizer --vocab-size 50 --lr 1 --train-iters 1"
    lines = report("--pipeline-model-parallel-size 2 --pipeline-schedule zb-v", base=small, ranks=2)
    rows = rows_of_ranks(lines)
    assert [row[-1] for row in rows] == ["embedding, layer 1; layer 4, head and loss", "layer 2; layer 3"]


def test_stages_that_are_balanced_by_cost_are_told() -> None:
    config = configured("--pipeline-model-parallel-layout auto", base=MEGATRON_LM, ranks=128)
    run = dry_run(config, PROVIDERS)
    (note,) = run.notes
    assert note.startswith("--pipeline-model-parallel-layout auto: stages Et")
    assert sum(len(stage.layers) for entry in run.ranks[::32] for stage in entry.shard.stages) == 32


@pytest.mark.fast("--use-torch-fsdp2-True", "-False")
@pytest.mark.parametrize(
    ("flags", "column"), [("--use-torch-fsdp2", True), ("--use-distributed-optimizer", False), ("", False)]
)
def test_gathered_units_have_a_column_if_there_are_any(flags: str, column: bool) -> None:
    lines = report(flags)
    titles = next(line for line in lines if line.split()[:2] == ["ranks", "number"])
    assert ("gathered units" in titles) == column == any("for gathered units" in line for line in lines)


def test_sizes_and_stages_in_words() -> None:
    assert size_text(100) == "100 bytes" and size_text(3 * 2**30) == "3.00 GiB (3,221,225,472 bytes)"
    assert short_size(1536) == "1.50 KiB"
    assert stage_text(StageModules(1, range(3, 3), False, False)) == "nothing"
    assert stage_text(StageModules(0, range(1, 2), True, True)) == "embedding, layer 1, head and loss"
    apart = "a copy of the embedding, 2 layers for multi-token prediction"
    assert stage_text(StageModules(2, range(3, 3), False, False, 2)) == apart
    last = "layer 3, a copy of the embedding, 1 layer for multi-token prediction, head and loss"
    assert stage_text(StageModules(2, range(3, 4), False, True, 1)) == last


def test_a_run_that_does_not_fit_ends_with_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured("--gpu h100 --dry-run")
    print_dry_run(config, TRAINS)
    assert "of NVIDIA H100 SXM 80GB\n" in capsys.readouterr().out
    monkeypatch.setattr(report_module, "memory_of_gpu", lambda config: (1_000_000, "a small GPU"))
    with pytest.raises(SystemExit) as ended:
        print_dry_run(config, TRAINS)
    assert ended.value.code == 2 and "of a small GPU: it does not fit\n" in capsys.readouterr().out
