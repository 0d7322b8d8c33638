"""Plans a run: from a specification (text, YAML or flags) to run.yaml, a mapping, a data contract and a checklist.

python tools/plan.py specification.txt --output plan
python tools/plan.py --params 7B --gpus 64 --gpu "H100 80GB" --seq-length 4096 --tokens 2T --tokenizer "Llama 3"

The exit code is 2 for a contradiction, with the nearest values, and 3 if a value is missing: one question a line.
docs/planning.md shows a whole plan.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

from megatron import programs
from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.checklist import entry_script
from megatron.diagnosis.planning.contract import pin
from megatron.diagnosis.planning.measuring import measure, with_measurements
from megatron.diagnosis.planning.plan import make_plan
from megatron.diagnosis.planning.questions import questions
from megatron.diagnosis.planning.report import contents, contract_text, print_plan, write_plan
from megatron.diagnosis.planning.specification import Specification, read_specification
from megatron.diagnosis.planning.specification_text import Answer, Answers, read_answers
from megatron.training.config.messages import message_of
from megatron.training.config.tool_flags import Section, read_tool_flags

USAGE = "python tools/plan.py [SPECIFICATION] [flags]"
ABOUT = (
    "Plan a run. SPECIFICATION is a text with the headings MODEL DEFINITION, HARDWARE, PARALLELISM, DATA PIPELINE and "
    "VALIDATION GATES, or YAML with the same keys; - reads standard input. Flags give or replace its values."
)
ASKS, WRONG = 3, 2


@dataclass(kw_only=True, frozen=True)
class SpecificationFlags:
    """Values of the specification, as they are written there."""

    architecture: str | None = None
    """Architecture, such as "Llama-style decoder-only"."""
    params: str | None = None
    """Parameter count, such as 7B or 13e9."""
    vocab_size: str | None = None
    """Entries of the vocabulary; the tokenizer's when not given."""
    seq_length: str | None = None
    """Tokens of the longest row."""
    objective: str | None = None
    """causal LM or masked LM."""
    framework: str | None = None
    """Framework; a note says what the plan is for."""
    gpus: str | None = None
    """Number of GPUs."""
    gpus_per_node: str | None = None
    """GPUs of a node."""
    gpu: str | None = None
    """Type and memory, such as "H100 80GB", or a TOML file that describes a GPU."""
    interconnect: str | None = None
    """Links, such as "NVLink intra-node, InfiniBand 400Gb inter-node"."""
    tensor_parallel: str | None = None
    """Tensor parallel size; chosen when not given, as are the sizes below."""
    pipeline_parallel: str | None = None
    """Pipeline parallel size."""
    context_parallel: str | None = None
    """Context parallel size."""
    expert_parallel: str | None = None
    """Expert parallel size."""
    data_parallel: str | None = None
    """Data parallel size."""
    zero_stage: str | None = None
    """ZeRO stage: 1, 2 or 3."""
    packing: str | None = None
    """Whether packed documents do not see each other: yes or no."""
    tokenizer: str | None = None
    """Tokenizer by name or path, with its size, such as "Llama 3 (128,256)"."""
    deduplication: str | None = None
    """Deduplication method: exact-match, MinHash, both or none."""
    data_mix: str | None = None
    """Sources and ratios, such as "70% web, 30% code"."""
    tokens: str | None = None
    """Tokens of the run, such as 2T."""
    throughput: str | None = None
    """Tokens per second and GPU that one node must reach."""
    checkpoint_interval: str | None = None
    """Steps between two checkpoints."""
    memory_utilization: str | None = None
    """Largest part of the memory that may be used, such as 85%."""
    loss_check: str | None = None
    """What the loss must do, in words."""


@dataclass(kw_only=True, frozen=True)
class PlanFlags:
    """What to do with the plan."""

    output: str | None = None
    """Folder for run.yaml, mapping.txt, data_contract.json, layouts.txt and checklist.sh; printed when not given."""
    overwrite: bool = False
    """Replace an earlier plan in the folder of --output."""
    measure: int | None = None
    """Try the best five layouts for a few steps with up to this many processes (GPUs) of this machine, and rank them by
    the measured times."""

    global_batch_size: int | None = None
    """Samples of a step; chosen when not given."""
    pin: str | None = None
    """Folder of a plan: write the digests of the prepared data sets and of their tokenizer into its contract, and
    exit."""

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value."""
        for field in ("global_batch_size", "measure"):
            if getattr(self, field) is not None and getattr(self, field) < 1:
                yield f"{{{field}}}: must be at least 1"
        if self.output == "" or self.pin == "":
            yield '{output:name} "" is an empty path, perhaps from a shell variable that is not set; give a path'


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    path = words.pop(0) if words and (words[0] == "-" or not words[0].startswith("--")) else None
    try:
        sections = Section("specification", SpecificationFlags), Section("plan", PlanFlags)
        given, flags = read_tool_flags(words, sections, USAGE, ABOUT)
        if flags.pin is not None:
            for line in pin(Path(flags.pin) / "data_contract.json"):
                print(line)
            return 0
        specification, notes = _read(path, given)
        asked = list(questions(specification))
        if asked:
            print("\n".join(asked))
            return ASKS
        plan = make_plan(specification, flags.global_batch_size, wanted=3 if flags.measure is None else 5)
        if flags.measure is not None:
            trials = []
            for trial in measure(plan, programs.entry_script("gpt").with_name(entry_script(plan)), flags.measure):
                print(f"tried {trial.candidate.layout.name}: {trial.reason}", flush=True)
                trials.append(trial)
            plan = with_measurements(plan, trials)
        console = Console(highlight=False)
        print_plan(plan, console)
        for note in notes:
            print(f"note: {note}")
        if flags.output is not None:
            write_plan(plan, Path(flags.output), flags.overwrite)
            print(f"\nwritten: {flags.output}; next: bash {Path(flags.output) / 'checklist.sh'} --list")
        else:
            for name, lines in {**contents(plan), "data contract": contract_text(plan)}.items():
                if name != "layouts.txt":
                    print(f"\n--- {name}", *lines, sep="\n")
    except UserError as error:
        for line in message_of(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return WRONG
    return 0


def _read(path: str | None, given: SpecificationFlags) -> tuple[Specification, Sequence[str]]:
    """Returns the specification of a file and flags, and lines about what was not read."""
    answers = Answers({}) if path is None else read_answers(path, _text(path))
    of_field, notes = dict(answers.of_field), list(answers.notes)
    for field in fields(given):
        value, flag = getattr(given, field.name), f"--{field.name.replace('_', '-')}"
        if value is not None:
            if field.name in of_field and of_field[field.name].text != value:
                notes.append(f"{flag} {value} replaces {of_field[field.name].text} ({of_field[field.name].where})")
            of_field[field.name] = Answer(value, flag)
    return read_specification(Answers(of_field)), notes


def _text(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a specification (docs/planning.md has one)") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; a specification is text") from None


if __name__ == "__main__":
    run_main(main)
