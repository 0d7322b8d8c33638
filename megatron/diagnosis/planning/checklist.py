"""checklist.sh: the steps between a plan and its launch, each with pass and fail."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.diagnosis.planning.gpus import known_gpus
from megatron.diagnosis.planning.plan import USUAL_UTILIZATION, Plan
from megatron.diagnosis.planning.settings_of_run import tokenizer_settings

_PART_OF_PREDICTION = 0.85
"""Part of the predicted rate that one node must reach if no target is specified."""


@dataclass(frozen=True)
class Step:
    """A step of the checklist."""

    name: str
    passes: str
    """What its success shows."""
    command: str
    """Bash; PASS if it exits with 0."""


def entry_script(plan: Plan) -> str:
    """Returns the script that trains the plan's model."""
    return f"pretrain_{_family(plan)}.py"


def _family(plan: Plan) -> str:
    return plan.run.model_family if plan.run.model_family in ("bert", "mamba") else "gpt"


def steps_of(plan: Plan) -> Iterator[Step]:
    """Yields the steps in their order."""
    spec = plan.specification
    run = '"$SCRIPT" --config "$HERE/run.yaml"'
    files = [
        str(s.value) for s in tokenizer_settings(spec, plan.shape.vocab_size) if s.field.endswith(("file", "model"))
    ]
    yield Step("machines", "every node can run it", "$ON_ALL_NODES python -m megatron doctor")
    if files:
        tests = " && ".join(f"test -e {shlex.quote(file)}" for file in files)
        yield Step("tokenizer", "its files are where run.yaml looks for them", tests)
    prefixes = " ".join(shlex.quote(source.prefix) for source in plan.sources)
    yield Step(
        "data", "indexes, sizes and content are as prepared", f"python -m megatron inspect_data --data-path {prefixes}"
    )
    yield Step("contract", "data and tokenizer are pinned", 'python -m megatron plan --pin "$HERE"')
    yield Step("dry-run", "flags, layout, memory and data fit together", f"python {run} --dry-run{_rates(plan)}")
    node = _one_node(plan)
    if node is not None:
        target = spec.throughput or _PART_OF_PREDICTION * plan.tokens_per_second
        said = spec.cite("throughput") if spec.throughput else f"{_PART_OF_PREDICTION:.0%} of the predicted rate"
        gate = f"python -m megatron validate {{}} --nproc-per-node {plan.cluster.gpus_per_node} -- {run} {node}"
        yield Step(
            "throughput",
            f"one node reaches {target:,.0f} tokens/s/GPU ({said})",
            gate.format(f"throughput --target {target:.0f}"),
        )
        most = 100 * (
            (spec.memory_utilization or USUAL_UTILIZATION) + _state_of_fewer(plan) / plan.cluster.gpu.memory.value
        )
        if most < 100:
            yield Step(
                "memory",
                f"the longest rows and the most uneven routing need at most {most:.0f}% of a GPU's memory on one node, "
                "whose fewer replicas share the optimizer's state",
                gate.format(f"memory --max-utilization {most:.0f}"),
            )
        yield Step(
            "resume",
            "a checkpoint round trip, before the first step of the run",
            gate.format("resume --steps 10 --at 5"),
        )
    steps, check = plan.loss_step, spec.loss_check
    expected = f" --expected-loss {check.most:g}" if check and check.most else ""
    yield Step(
        "loss",
        f"the first {steps:,} steps fall steeply, then flatten" + (f" ({check.text})" if check else ""),
        f"$LAUNCH {run} --exit-interval {steps} && "
        f"python -m megatron validate loss --run checkpoints --by-step {steps}{expected}",
    )
    yield Step("launch", "the run, from the checkpoint of those steps", f"$LAUNCH {run}")


def _state_of_fewer(plan: Plan) -> float:
    """Returns the bytes of optimizer state that a GPU holds more on one node than in the whole run."""
    layout, cluster = plan.chosen.layout, plan.cluster
    of_rank = 12 * plan.shape.parameters / (layout.tensor * layout.pipeline)
    whole = layout.data * layout.context
    return of_rank * (cluster.gpus / cluster.gpus_per_node - 1) / whole if layout.zero else 0.0


def _rates(plan: Plan) -> str:
    """Returns the flags with which a dry run predicts times of the plan's machines."""
    gpu, link = plan.cluster.gpu.name, plan.cluster.link
    file = plan.specification.gpu
    named = gpu if gpu in known_gpus() or file is None else shlex.quote(file)
    return f" --gpu {named}" + (f" --link {link * 8 / 1e9:g}Gb" if link is not None else "")


def _one_node(plan: Plan) -> str | None:
    """Returns the flags with which one node trains a part of the plan: the same layout with fewer replicas, on made-up
    data. None if a replica needs several nodes."""
    layout, node = plan.chosen.layout, plan.cluster.gpus_per_node
    replica = layout.tensor * layout.context * layout.pipeline
    if node % replica or node < replica:
        return None
    share = plan.values.global_batch_size * node // plan.cluster.gpus
    data = node // replica
    batch = max(1, share // (data * layout.micro_batch)) * data * layout.micro_batch
    return f"--mock-data --global-batch-size {batch}"


def checklist_lines(plan: Plan) -> Iterator[str]:
    """Yields the lines of checklist.sh."""
    steps, cluster = list(steps_of(plan)), plan.cluster
    nodes = cluster.gpus // cluster.gpus_per_node
    torchrun = f"torchrun --nnodes {nodes} --nproc_per_node {cluster.gpus_per_node}"
    if nodes > 1:
        torchrun += " --rdzv_backend c10d --rdzv_endpoint ${MASTER_ADDR:-localhost}:${MASTER_PORT:-29500}"
    yield "#!/bin/bash"
    yield "# The steps between this plan and its launch; the first that fails ends it."
    yield "# Start it in a checkout, or anywhere with the wheel installed:"
    yield "#   bash DIR/checklist.sh            all steps but launch"
    yield "#   bash DIR/checklist.sh loss       one step"
    yield "#   bash DIR/checklist.sh --list     what the steps are"
    yield "# LAUNCH starts the run's processes, ON_ALL_NODES a command on each node (such as srun -N 8)."
    yield "set -uo pipefail"
    yield 'HERE=$(dirname "${BASH_SOURCE[0]}")'
    yield f'LAUNCH=${{LAUNCH:-"{torchrun}"}}'
    yield "ON_ALL_NODES=${ON_ALL_NODES:-}"
    path = f"from megatron.programs import entry_script; print(entry_script('{_family(plan)}'))"
    yield f'SCRIPT=$(python -c "{path}" 2> /dev/null) || {{'
    yield "    echo 'error: start this in the folder of pretrain_gpt.py, or install the wheel' >&2"
    yield "    exit 2"
    yield "}"
    yield ""
    for step in steps:
        yield f"step_{step.name.replace('-', '_')}() {{ # {step.passes}"
        yield f"    {step.command}"
        yield "}"
    yield ""
    yield f"STEPS=({' '.join(step.name for step in steps)})"
    yield "case ${1:-all} in"
    yield "--list)"
    yield from (f"    echo {shlex.quote(f'{step.name:<12} {step.passes}')}" for step in steps)
    yield "    exit 0"
    yield "    ;;"
    yield 'all) CHOSEN=("${STEPS[@]:0:${#STEPS[@]}-1}") ;;'
    yield f'{" | ".join(step.name for step in steps)}) CHOSEN=("$1") ;;'
    yield "*)"
    yield '    echo "error: $1: no step of this checklist; its steps are ${STEPS[*]}" >&2'
    yield "    exit 2"
    yield "    ;;"
    yield "esac"
    yield 'for step in "${CHOSEN[@]}"; do'
    yield '    echo "== $step"'
    yield '    if "step_${step//-/_}"; then'
    yield '        echo "PASS $step"'
    yield "    else"
    yield '        echo "FAIL $step" >&2'
    yield "        exit 1"
    yield "    fi"
    yield "done"
