"""run.yaml: the settings of a plan for --config, each with the reason for its value."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from megatron.diagnosis.planning.settings_of_run import Setting

_PLAIN = re.compile(r"(?!(?:null|true|false|yes|no|on|off|y|n|~)$)[A-Za-z_./][A-Za-z0-9_./+@-]*", re.IGNORECASE)


def run_file_lines(title: Sequence[str], sections: Mapping[str, Iterable[Setting]]) -> Iterator[str]:
    """Yields the lines of run.yaml: a title as comments, then each section's settings with their reasons."""
    yield from (f"# {line}".rstrip() for line in title)
    for heading, settings in sections.items():
        yield ""
        yield f"# {heading}"
        for setting in settings:
            yield f"{f'{setting.field}: {yaml_value(setting.value)}':<52} # {setting.reason}"


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
