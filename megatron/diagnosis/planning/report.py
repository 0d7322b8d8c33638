"""What tools/plan.py prints and writes about a plan."""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.checklist import checklist_lines, entry_script
from megatron.diagnosis.planning.contract import contract_lines, contract_of
from megatron.diagnosis.planning.mapping import mapping_lines
from megatron.diagnosis.planning.plan import Plan
from megatron.diagnosis.planning.quantities import short
from megatron.diagnosis.planning.ranking import slower
from megatron.diagnosis.planning.settings_of_run import Setting

FILES = ("run.yaml", "data_contract.json", "mapping.txt", "layouts.txt", "checklist.sh")
"""The files of a plan."""
_PLAIN = re.compile(r"(?!(?:null|true|false|yes|no|on|off|y|n|~)$)[A-Za-z_./][A-Za-z0-9_./+@-]*", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table of a report."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def plain(self) -> Iterator[str]:
        """Yields the table as lines of text."""
        yield self.title
        columns = range(len(self.headings))
        widths = [max(len(row[column]) for row in (self.headings, *self.rows)) for column in columns]
        for row in (self.headings, *self.rows):
            yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def summary_lines(plan: Plan) -> Iterator[str]:
    """Yields the plan in a few lines."""
    spec, shape, values, cluster = plan.specification, plan.shape, plan.values, plan.cluster
    assert spec.seq_length is not None and spec.tokens is not None
    chosen = plan.chosen
    active = f", {short(shape.active_parameters)} active" if shape.active_parameters != shape.parameters else ""
    flags = shape.flags
    yield (
        f"model     {shape.parameters:,} parameters{active}: {flags['num_layers']} layers of {flags['hidden_size']}, "
        f"vocabulary {shape.vocab_size:,} ({'published' if flags == shape.basis.flags else 'scaled from'} "
        f"{shape.basis.name})"
    )
    yield (
        f"machines  {cluster.gpus:,} x {cluster.gpu.title}, {cluster.gpus_per_node} a node, "
        f"{cluster.gpus_per_nvlink_domain} joined by NVLink"
    )
    yield f"layout    {plan.chosen.layout.name}"
    tokens = values.global_batch_size * spec.seq_length
    yield (
        f"step      {values.global_batch_size:,} samples, {tokens:,} tokens, {chosen.seconds:.3g} s; "
        f"{plan.tokens_per_second:,.0f} tokens/s/GPU, {chosen.time.mfu:.0%} MFU"
    )
    days = chosen.seconds * values.train_iters / 86400
    yield (
        f"run       {values.train_iters:,} steps, {short(spec.tokens)} tokens, {days:,.1f} days, "
        f"{days * 24 * cluster.gpus:,.0f} GPU-hours"
    )
    yield f"memory    {chosen.memory / 1e9:.1f} GB of {plan.memory_limit / 1e9:.1f} on the fullest rank"
    yield f"error     the time is expected within {chosen.time.error:.0%}; --dry-run names what its parts rest on"
    if plan.measured:
        yield f"{plan.measured.replace(':', ' ', 1)}"


def tables(plan: Plan) -> Iterator[Grid]:
    """Yields the best layouts, and why others lost."""
    batch, seconds = plan.values.global_batch_size, plan.chosen.seconds
    assert plan.specification.seq_length is not None
    tokens = batch * plan.specification.seq_length / plan.cluster.gpus
    rows = []
    for number, found in enumerate(plan.ranking.best[:3], 1):
        rows.append(
            (
                str(number),
                found.layout.name,
                f"{found.seconds:.3f} s",
                f"{tokens / found.seconds:,.0f}",
                f"{found.memory / 1e9:.1f} GB",
                f"{found.time.bubble:.1%}",
                f"{100 * (found.seconds / seconds - 1):+.1f}%",
            )
        )
    headings = ("", "layout", "step", "tokens/s/GPU", "memory", "bubble", "time")
    yield Grid("the best layouts", headings, tuple(rows))
    ranking = plan.ranking
    losers = [(loser.layout.name, loser.reason) for loser in ranking.losers]
    losers += [(found.layout.name, slower(found.seconds, seconds)) for found in ranking.best[3:]]
    title = f"why others lost ({ranking.considered:,} layouts that the rules allow, {ranking.too_large:,} too large)"
    yield Grid(title, ("layout", "reason"), tuple(dict.fromkeys(losers)))


def print_plan(plan: Plan, console: Console) -> None:
    """Prints the plan: tables on a terminal, plain text elsewhere."""
    for line in summary_lines(plan):
        _print(console, line)
    for grid in tables(plan):
        _print(console, "")
        if console.is_terminal:
            table = Table(*grid.headings, title=grid.title, title_justify="left")
            for row in grid.rows:
                table.add_row(*row)
            console.print(table)
        else:
            for line in grid.plain():
                _print(console, line)
    _print(console, "")
    for note in plan.notes:
        _print(console, f"note: {note}")


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


# ---------------------------------------------------------------------------------------------------------------------
# Files


def contents(plan: Plan) -> dict[str, list[str]]:
    """Returns the lines of the files of a plan, except for the data contract, which writes itself."""
    layouts = [*summary_lines(plan), ""]
    for grid in tables(plan):
        layouts += [*grid.plain(), ""]
    layouts += [f"note: {note}" for note in plan.notes]
    return {
        "run.yaml": _run_yaml(plan),
        "mapping.txt": [*mapping_lines(plan.run.with_stages(plan.chosen.layout)[0], plan.cluster.gpus_per_node)],
        "layouts.txt": layouts,
        "checklist.sh": [*checklist_lines(plan)],
    }


def _run_yaml(plan: Plan) -> list[str]:
    """Returns the settings of a plan for --config, each with the reason for its value."""
    sections, cite = dict(plan.sections()), plan.specification.cite
    cluster = plan.cluster
    cited = cite("gpus_per_node") if plan.specification.gpus_per_node else "assumed; see the notes above"
    joined = f"{cluster.gpu.title}, {cluster.gpus_per_node} a node; tensor parallel groups beyond it are refused"
    sections["machines"] = [
        Setting("planned_world_size", cluster.gpus, cite("gpus")),
        Setting("gpus_per_node", cluster.gpus_per_node, cited),
        Setting("gpus_per_nvlink_domain", cluster.gpus_per_nvlink_domain, joined),
    ]
    sections["plan"] = [
        Setting("data_contract", "data_contract.json", "clauses that the run checks before its first step"),
    ]
    sections["validation and checkpoints"] += [
        Setting("save", "checkpoints", "change it to a folder that all nodes share"),
        Setting("load", "checkpoints", "a restarted run continues from its newest checkpoint"),
        Setting("metrics_path", "checkpoints/metrics.jsonl", "tools/validate.py reads it"),
    ]
    title = [
        f"A plan by tools/plan.py for {entry_script(plan)}; each value names its reason.",
        "",
        *summary_lines(plan),
        "",
        *(f"note: {note}" for note in plan.notes),
    ]
    lines = [f"# {line}".rstrip() for line in title]
    for heading, settings in sections.items():
        lines += ["", f"# {heading}"]
        lines += [f"{f'{each.field}: {yaml_value(each.value)}':<52} # {each.reason}" for each in settings]
    return lines


def yaml_value(value: object) -> str:
    """Returns a value as YAML on one line."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(yaml_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, int) or _PLAIN.fullmatch(str(value)):
        return str(value)
    return json.dumps(str(value))


def write_plan(plan: Plan, folder: Path, overwrite: bool) -> None:
    """Writes the files of a plan. Raises UserError if one exists, unless it may be overwritten."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        present = [name for name in FILES if (folder / name).exists()]
        if present and not overwrite:
            raise UserError(f"--output {folder}: {present[0]} exists there; give another folder, or --overwrite")
        for name, lines in contents(plan).items():
            (folder / name).write_text("\n".join(lines) + "\n", "utf-8")
        (folder / "checklist.sh").chmod(0o755)
        contract_of(plan).write(folder / "data_contract.json")
    except OSError as error:
        raise UserError(f"--output {folder}: {error.filename or folder}: {error.strerror}") from None


def contract_text(plan: Plan) -> Sequence[str]:
    """Returns the clauses of the plan's data contract for a reader."""
    return list(contract_lines(contract_of(plan)))
