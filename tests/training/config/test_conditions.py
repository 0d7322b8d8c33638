"""A flag that has no effect beside the values of other flags says so; every flag is declared or reviewed."""

from pathlib import Path
from types import SimpleNamespace

from support.command_lines import configured, words_of
from support.each import for_each

from megatron.training.config.conditions import UNKNOWN, Condition, lacking, needs_of, ways_of
from megatron.training.config.flag_table import Flag, flag_table
from megatron.training.config.resolution import ConfigurationError

TABLE = flag_table()
REVIEWED = {
    section.partition(":")[0]: section.partition("\n")[2].split()
    for section in (Path(__file__).parents[2] / "data/flags/reviewed_fields.txt").read_text("utf-8").split("# ")[1:]
}
"""Fields without a declared condition by section: read in every run, refused alone, of a rule, or said by others."""
DEPENDENT = [(flag.field, place) for flag in TABLE.values() for place in range(len(needs_of(flag)))]


def test_every_flag_declares_on_what_it_depends_or_is_reviewed() -> None:
    """A new field belongs into the file of reviewed fields only if no value of another flag makes it ineffective in
    silence."""
    reviewed = [field for fields in REVIEWED.values() for field in fields]
    assert len(reviewed) == len(set(reviewed)) and set(reviewed) <= TABLE.keys()
    for field, flag in TABLE.items():
        declaration = flag.declaration
        declared = declaration.only_with or declaration.families or declaration.no_effect or declaration.supported
        assert bool(declared) != (field in reviewed), field


@for_each(REVIEWED["REFUSED_ALONE"])
def test_a_flag_that_has_no_effect_alone_is_refused(field: str) -> None:
    flag = TABLE[field]
    assert any(line.startswith(flag.spelling) for line in said(flag, "")), field


@for_each(DEPENDENT)
def test_a_flag_without_what_it_depends_on_says_so(dependent: tuple[str, int]) -> None:
    field, place = dependent
    flag = TABLE[field]
    others = needs_of(flag)
    met = [words_for(need) for need in others[:place]]
    lines = said(flag, " ".join([*met, without(others[place])]))
    assert any(flag.spelling in line for line in lines), lines


def said(flag: Flag, others: str) -> list[str]:
    """Returns the notes, or the errors, of a small run with this flag after others."""
    words = " ".join(words_of(flag))
    try:
        return list(configured(f"{others} {flag.spelling} {words}").notes)
    except ConfigurationError as error:
        return error.problems


def words_for(condition: Condition) -> str:
    """Returns words under which the condition holds."""
    flag = condition.flag
    if flag.switch is not None:
        return "" if condition.holds(flag.default) else flag.spelling
    word = condition.words[0] if condition.words and not condition.is_excluded else ""
    return "" if condition.holds(flag.default) else f"{flag.spelling} {word or ' '.join(words_of(flag))}"


def without(condition: Condition) -> str:
    """Returns words under which the condition does not hold."""
    flag = condition.flag
    if condition.words == ("NullTokenizer",):  # that of `configured`
        return "--tokenizer-type TikTokenizer --tokenizer-model x"
    if not condition.holds(flag.default):
        return ""
    if flag.switch is not None:
        return flag.spelling
    other = condition.words[0] if condition.is_excluded else words_of(flag)[0]
    return f"{flag.spelling} {other}"


def test_conditions_are_read_through_those_that_they_name() -> None:
    def lack(field: str, **values: object) -> str | None:
        condition = lacking(TABLE[field], lambda name: values.get(name, TABLE[name].default))
        return None if condition is None else condition.lack(values.get(condition.flag.field, condition.flag.default))

    assert lack("fim_fragment_rate", fim_split_sample="x") == "without --fim-data"
    assert lack("fim_fragment_rate", fim_split_sample="x", fim_data=True) is None
    assert (
        lack("add_qkv_bias") == "without --disable-bias-linear" and lack("add_qkv_bias", add_bias_linear=False) is None
    )
    assert lack("hysteresis", fp16=True, loss_scale=8.0) == "with --loss-scale 8.0"
    assert lack("eval_interval", eval_iters=0) == "with --eval-iters 0" and lack("eval_interval") is None
    assert lack("mid_level_dataset_surplus", mock_data=True) == "with --mock-data"
    assert lack("nonfinite_action", check_for_nan_in_loss_and_grad=False) == "with --no-check-for-nan-in-loss-and-grad"
    assert lack("cp_comm_type") == "while --context-parallel-size is 1"
    assert lack("adam_beta1", optimizer="muon") is None  # muon's other parameters
    assert lack("adam_beta1", optimizer="sgd") == "without --optimizer adam"  # sgd has no --muon-scalar-optimizer


def test_an_unknown_value_counts_as_what_is_needed() -> None:
    flag = TABLE["rope_scaling_beta_fast"]
    assert lacking(flag, lambda name: UNKNOWN) is None
    assert lacking(flag, vars(SimpleNamespace(rope_scaling_type="llama3")).get) is not None


def test_conditions_name_flags() -> None:
    for flag in TABLE.values():
        for condition in (*needs_of(flag), *ways_of(flag)):
            assert condition.text().startswith(("with --", "without --")), flag.field
