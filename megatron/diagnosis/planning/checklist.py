"""checklist.sh: the steps between a plan and its launch, each with pass and fail."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.diagnosis.planning.plan import Plan
from megatron.diagnosis.planning.settings_of_run import tokenizer_settings


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
    return {"bert": "pretrain_bert.py", "mamba": "pretrain_mamba.py"}.get(plan.run.model_family, "pretrain_gpt.py")


def steps_of(plan: Plan) -> Iterator[Step]:
    """Yields the steps in their order."""
    spec, values = plan.specification, plan.values
    script = entry_script(plan)
    run = f'{script} --config "$HERE/run.yaml"'
    files = [
        str(s.value) for s in tokenizer_settings(spec, plan.shape.vocab_size) if s.field.endswith(("file", "model"))
    ]
    yield Step("machines", "every node can run it", "$ON_ALL_NODES python tools/doctor.py")
    if files:
        tests = " && ".join(f"test -e {shlex.quote(file)}" for file in files)
        yield Step("tokenizer", "its files are where run.yaml looks for them", tests)
    prefixes = " ".join(shlex.quote(source.prefix) for source in plan.sources)
    yield Step(
        "data", "indexes, sizes and content are as prepared", f"python tools/inspect_data.py --data-path {prefixes}"
    )
    yield Step("contract", "data and tokenizer are pinned", 'python tools/plan.py --pin "$HERE"')
    yield Step("dry-run", "flags, layout, memory and data fit together", f"python {run} --dry-run")
    node = _one_node(plan)
    if node is not None:
        target = f" --target {spec.throughput:g}" if spec.throughput else ""
        yield Step(
            "throughput",
            "one node is as fast as planned" + (f": {spec.throughput:,.0f} tokens/s/GPU" if spec.throughput else ""),
            f"python tools/validate.py throughput{target} -- {run} {node}",
        )
        yield Step(
            "memory",
            f"the longest rows and the most uneven routing need at most {plan.memory_limit / 1e9:.1f} GB a GPU",
            f"python tools/validate.py memory -- {run} {node}",
        )
    steps = min(1000, values.train_iters)
    yield Step(
        "loss",
        "it falls steeply, then flattens" + (f"; {spec.loss_check}" if spec.loss_check else ""),
        f"$LAUNCH python tools/validate.py loss -- {run} --exit-interval {steps}",
    )
    yield Step(
        "resume",
        "a checkpoint round trip, within the first 1,000 steps",
        f"$LAUNCH python tools/validate.py resume -- {run}",
    )
    yield Step("launch", "the run", f"$LAUNCH {run}")


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
    yield "# Start it in the folder of pretrain_gpt.py:"
    yield "#   bash DIR/checklist.sh            all steps but launch"
    yield "#   bash DIR/checklist.sh loss       one step"
    yield "#   bash DIR/checklist.sh --list     what the steps are"
    yield "# LAUNCH starts the run's processes, ON_ALL_NODES a command on each node (such as srun -N 8)."
    yield "set -uo pipefail"
    yield 'HERE=$(dirname "${BASH_SOURCE[0]}")'
    yield f'LAUNCH=${{LAUNCH:-"{torchrun}"}}'
    yield "ON_ALL_NODES=${ON_ALL_NODES:-}"
    yield "[ -f pretrain_gpt.py ] || { echo 'error: start this in the folder of pretrain_gpt.py' >&2; exit 2; }"
    yield ""
    for step in steps:
        yield f"{_function(step.name)}() {{ # {step.passes}"
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


def _function(name: str) -> str:
    return f"step_{name.replace('-', '_')}"
