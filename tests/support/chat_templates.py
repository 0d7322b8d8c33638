"""Chat templates in the styles of well-known models, written for tests. {% generation %} marks by hand what is learned;
`untagged` leaves the tags out, so that the marks are the expected answer."""

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHATML = """
{%- for m in messages %}
{{- '<|im_start|>' + m['role'] + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA3 = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system_message + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

QWEN3 = """
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = messages|length - 1 - loop.index0 %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set thoughts = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not thoughts and '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

DEEPSEEK = """
{%- if not add_generation_prompt is defined %}{%- set add_generation_prompt = false %}{%- endif %}
{%- set ns = namespace(system='', after_tool=false) %}
{%- for message in messages %}{%- if message.role == 'system' %}{%- set ns.system = ns.system + message.content %}
{%- endif %}{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.after_tool = false %}{{- '<|User|>' + message.content }}{%- endif %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|Assistant|>' }}{%- generation %}
        {%- for call in message.tool_calls %}
            {{- '<|call|>' + call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```<|end_call|>' }}
        {%- endfor %}{{- eos_token }}{%- endgeneration %}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1] %}
        {{- '<|outputs_end|>' if ns.after_tool else '<|Assistant|>' }}
        {%- set ns.after_tool = false %}
        {%- generation %}{{- content + eos_token }}{% endgeneration %}
    {%- endif %}
    {%- if message.role == 'tool' %}
        {{- '' if ns.after_tool else '<|outputs_begin|>' }}{{- '<|output|>' + message.content }}
        {%- set ns.after_tool = true %}
    {%- endif %}
{%- endfor %}
{%- if ns.after_tool %}{{- '<|outputs_end|>' }}{%- endif %}
{%- if add_generation_prompt and not ns.after_tool %}{{- '<|Assistant|><think>\\n' }}{%- endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first and role != 'model' else '') }}
    {%- if role == 'model' -%}
        {% generation %}{{ message['content'] | trim }}{{ '<end_of_turn>' }}{% endgeneration %}{{ '\\n' }}
    {%- elif message['content'] is string -%}{{ message['content'] | trim }}{{ '<end_of_turn>\\n' }}
    {%- else -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}{{ '<end_of_turn>\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""

GPT_OSS = """
{%- macro system() %}{{- 'You chat. Date: ' + (today if today is defined else 'unknown') }}{%- endmacro %}
{{- '<|start|>system<|message|>' }}{{- system() }}{{- '<|end|>' }}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|start|>assistant' }}{% generation %}
        {%- if message.tool_calls -%}
            {%- set call = message.tool_calls[0].function %}
            {%- if message.thinking %}
                {{- '<|channel|>analysis<|message|>' + message.thinking + '<|end|><|start|>assistant' }}
            {%- endif %}
            {{- ' to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
            {{- call.arguments | tojson }}{{- '<|call|>' }}
        {%- elif loop.last -%}
            {%- if message.thinking %}
                {{- '<|channel|>analysis<|message|>' + message.thinking + '<|end|><|start|>assistant' }}
            {%- endif %}
            {{- '<|channel|>final<|message|>' + message.content + '<|return|>' }}
        {%- else %}{{- '<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- endif -%}
        {% endgeneration %}
    {%- elif message.role == 'tool' -%}
        {{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson }}{{- '<|end|>' }}
    {%- else -%}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' }}{%- endif -%}"""

MISTRAL = """
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set loop_messages = messages %}{%- endif %}
{%- set users = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}{{- tool.function | tojson }}{{- ', ' if not loop.last }}{%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.last and system else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {% generation %}{{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}{{- call.function | tojson }}{{- ', ' if not loop.last }}{%- endfor %}
        {{- ']' + eos_token }}{%- endgeneration %}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{{- ' ' + message.content | trim + eos_token }}{% endgeneration %}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only user, assistant and tool are supported.') }}{%- endif %}
{%- endfor %}"""

# A mark after the last turn only, and the prompt in the loop.
PHI = """{% for m in messages %}{{ '<|' + m.role + '|>\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>' }}
{%- if loop.last %}{{ '\\n' + eos_token }}{% endif %}{% endgeneration %}{{ '' if loop.last else '\\n' }}
{%- else %}{{ m.content + '<|end|>\\n' }}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"""
INDEXED = """{% for i in range(messages | length) %}{% set m = messages[i] %}{% set other = messages[i - 1] %}
{{- '[' + m.role + ']' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content ~ '<|end|>' }}{% endgeneration %}
{%- else %}{{ m.content }}{% endif %}{% endfor %}{{ '[assistant]' if add_generation_prompt }}"""

STYLES = {
    "ChatML": CHATML,
    "Llama 3": LLAMA3,
    "Qwen 3": QWEN3,
    "DeepSeek": DEEPSEEK,
    "Gemma": GEMMA,
    "gpt-oss": GPT_OSS,
    "Mistral": MISTRAL,
    "Phi": PHI,
    "indexed": INDEXED,
}
WITH_CALLS = ("Qwen 3", "DeepSeek", "gpt-oss", "Mistral")
"""Styles that write calls of tools."""


def untagged(template: str) -> str:
    """Returns the template without {% generation %}, with the same blanks."""
    return re.sub(r"\{%(-?) *(?:end)?generation *(-?)%\}", r"{%\1 if true %}{% endif \2%}", template)


def write_folder(folder: Path, template: str, **config: object) -> str:
    """Writes a byte-level tokenizer without merges, with the special tokens of a template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    marks = re.findall(r"<\|\w+\|>|<\w+_of_turn>", template)
    made.add_special_tokens([AddedToken(mark, normalized=False) for mark in dict.fromkeys(["<s>", "</s>", *marks])])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    content = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(content | {"chat_template": template} | config))
    return str(folder)
