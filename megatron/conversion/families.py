"""The architectures of transformers that can be converted, as data."""

import difflib
import re
from collections.abc import Mapping, Sequence

from megatron.conversion.baichuan import BAICHUAN_FAMILY
from megatron.conversion.bamba import BAMBA_FAMILY
from megatron.conversion.bert import BERT_FAMILIES
from megatron.conversion.chatglm import CHATGLM_FAMILY
from megatron.conversion.cohere import COHERE_FAMILIES
from megatron.conversion.decilm import DECILM_FAMILY
from megatron.conversion.deepseek import DEEPSEEK_FAMILIES
from megatron.conversion.deepseek_v32 import DEEPSEEK_V32_FAMILY
from megatron.conversion.ernie import ERNIE_FAMILY, ERNIE_MOE_FAMILY
from megatron.conversion.exaone4 import EXAONE4_FAMILY
from megatron.conversion.falcon import FALCON_FAMILY
from megatron.conversion.family import Family
from megatron.conversion.gemma import GEMMA_FAMILIES
from megatron.conversion.glm import GLM4_MOE_FAMILY, GLM_FAMILIES
from megatron.conversion.gpt2 import GPT2_FAMILY, GPT_BIGCODE_FAMILY
from megatron.conversion.gpt_neox import GPT_NEOX_FAMILY
from megatron.conversion.gpt_oss import GPT_OSS_FAMILIES
from megatron.conversion.hub_defaults import Json
from megatron.conversion.llama import GRANITE_MOE_FAMILY, LLAMA_FAMILIES, QWEN2_MOE_FAMILY
from megatron.conversion.llama4 import LLAMA4_FAMILY
from megatron.conversion.mamba import MAMBA2_FAMILY
from megatron.conversion.minimax_m2 import MINIMAX_M2_FAMILY
from megatron.conversion.modernbert import MODERNBERT_FAMILY
from megatron.conversion.nemotron_h import NEMOTRON_H_FAMILY
from megatron.conversion.olmo import OLMO_FAMILIES
from megatron.conversion.phi import PHI_FAMILY
from megatron.conversion.phi3 import PHI3_FAMILY
from megatron.conversion.qwen3_next import QWEN3_5_FAMILY, QWEN3_NEXT_FAMILY
from megatron.conversion.seed_oss import SEED_OSS_FAMILY
from megatron.conversion.smollm3 import SMOLLM3_FAMILY
from megatron.conversion.t5 import T5_FAMILIES
from megatron.conversion.ungated import ARCEE_FAMILY, NEMOTRON_FAMILY, STARCODER2_FAMILY
from megatron.core.exceptions import UserError

FAMILIES: tuple[Family, ...] = (
    *LLAMA_FAMILIES,
    *GPT_OSS_FAMILIES,
    *DEEPSEEK_FAMILIES,
    DEEPSEEK_V32_FAMILY,
    *GEMMA_FAMILIES,
    *OLMO_FAMILIES,
    GPT2_FAMILY,
    PHI3_FAMILY,
    FALCON_FAMILY,
    ARCEE_FAMILY,
    *COHERE_FAMILIES,
    ERNIE_FAMILY,
    EXAONE4_FAMILY,
    *GLM_FAMILIES,
    GPT_BIGCODE_FAMILY,
    GPT_NEOX_FAMILY,
    NEMOTRON_FAMILY,
    PHI_FAMILY,
    QWEN2_MOE_FAMILY,
    SEED_OSS_FAMILY,
    SMOLLM3_FAMILY,
    STARCODER2_FAMILY,
    GLM4_MOE_FAMILY,
    ERNIE_MOE_FAMILY,
    LLAMA4_FAMILY,
    GRANITE_MOE_FAMILY,
    MINIMAX_M2_FAMILY,
    QWEN3_NEXT_FAMILY,
    QWEN3_5_FAMILY,
    MAMBA2_FAMILY,
    NEMOTRON_H_FAMILY,
    BAMBA_FAMILY,
    *BERT_FAMILIES,
    MODERNBERT_FAMILY,
    *T5_FAMILIES,
    BAICHUAN_FAMILY,
    DECILM_FAMILY,
    CHATGLM_FAMILY,
)
"""All families. An export takes the first that expresses the model; those without a class in transformers come last."""


_TASK = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")
"""The end of a class's name, which says what it is for."""


def family_of(architecture: str, families: Sequence[Family] = FAMILIES) -> Family:
    """Returns the family of a class of transformers. Raises UserError with the nearest class and all known ones."""
    for family in families:
        if architecture == family.architecture:
            return family
    if "hyena" in architecture.lower():
        raise UserError(f"{architecture} is unsupported: this project has no layer with Hyena's long convolutions")
    known = [family.architecture for family in families]
    stems = {_TASK.sub("", name): name for name in reversed(known)}
    near = difflib.get_close_matches(_TASK.sub("", architecture), stems, n=1, cutoff=0.0)
    nearest = f" (the nearest is {stems[near[0]]})" if near else ""
    raise UserError(
        f"{architecture} is unknown; docs/extending.md says how to add it; these are known{nearest}: {', '.join(known)}"
    )


def family_in(architecture: str, file: str, families: Sequence[Family] = FAMILIES) -> Family:
    """Returns the family of a class that the config.json `file` names. Raises UserError as `family_of`."""
    try:
        return family_of(architecture, families)
    except UserError as error:
        raise UserError(f"{file}: architectures: {error}") from error


def architecture_in(config: Mapping[str, Json], file: str, families: Sequence[Family] = FAMILIES) -> str:
    """Returns the class that config.json names. Raises UserError, naming `file`, if it names none or several."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1:
        known = ", ".join(family.architecture for family in families)
        raise UserError(
            f"{file}: architectures is {names} and model_type is {config.get('model_type')!r}; "
            f"architectures must name one of {known}"
        )
    return str(names[0])
