"""Chat templates in the styles that models publish, written for these tests, and chats for them."""

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | string + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# Thinking is kept after the last question of the user only; tools come as lines of JSON.
HERMES = """{%- set ns = namespace(last=messages|length - 1, looking=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == "user" and message.content is string and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.looking = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages and messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' ~ content ~ '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# Declarations and calls as XML, through a macro.
XML_TOOLS = """{%- macro extra(json, known) -%}
    {%- if json is mapping %}
        {%- for key in json if key not in known %}
            {%- set value = json[key] | tojson | safe if json[key] is mapping or (json[key] is sequence and json[key] is not string) else json[key] | string %}
            {{- '\\n<' ~ key ~ '>' ~ value ~ '</' ~ key ~ '>' }}
        {%- endfor %}
    {%- endif %}
{%- endmacro -%}
{%- set enable_thinking = enable_thinking if enable_thinking is defined else true %}
{%- if messages and messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}{%- set rest = messages %}
{%- endif %}
{{- "<|im_start|>system\\n" + system }}
{%- if tools is iterable and tools | length > 0 %}
    {{- "\\n\\n<tools>" }}
    {%- for tool in tools %}
        {%- set tool = tool.function if tool.function is defined else tool %}
        {{- "\\n<function>\\n<name>" ~ tool.name ~ "</name>" }}
        {%- if tool.description is defined %}{{- '\\n<description>' ~ (tool.description | trim) ~ '</description>' }}{%- endif %}
        {{- '\\n<parameters>' }}
        {%- if tool.parameters is mapping and tool.parameters.properties is mapping %}
            {%- for name, fields in tool.parameters.properties | items %}
                {{- '\\n<parameter>\\n<name>' ~ name ~ '</name>' }}
                {%- if fields.type is defined %}{{- '\\n<type>' ~ fields.type | string ~ '</type>' }}{%- endif %}
                {{- extra(fields, ['name', 'type', 'description']) }}
                {{- '\\n</parameter>' }}
            {%- endfor %}
        {%- endif %}
        {{- extra(tool.parameters, known=['type', 'properties']) }}
        {{- '\\n</parameters>\\n</function>' }}
    {%- endfor %}
    {{- "\\n</tools>" }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in rest %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- '<|im_start|>assistant\\n' }}
        {{- message.content | default('', true) | trim }}
        {%- if message.tool_calls is defined and message.tool_calls is iterable %}
            {%- for call in message.tool_calls %}
                {%- set call = call.function if call.function is defined else call %}
                {{- '\\n<tool_call>\\n<function=' ~ call.name ~ '>\\n' }}
                {%- for key, value in call.arguments | items %}
                    {{- '<parameter=' ~ key ~ '>\\n' }}
                    {{- value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string }}
                    {{- '\\n</parameter>\\n' }}
                {%- endfor %}
                {{- '</function>\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user\\n' }}{%- endif %}
        {{- '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>\\n' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif message.role in ['user', 'system'] %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- else %}
        {{- raise_exception('Unexpected role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking else '<think></think>') }}
{%- endif %}"""

# Strict alternation, and content that may be a list of parts.
INST = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages if message.role in ("user", "assistant") and not message.tool_calls %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("Roles must alternate user/assistant") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- set content %}
        {%- if message.content is iterable and message.content is not string %}
            {%- for part in message.content %}
                {%- if part.type == 'text' %}{{ part.text }}{% else %}<|{{ part.type | upper }}|>{% endif %}
            {%- endfor %}
        {%- else %}{{ message.content or '' }}{% endif %}
    {%- endset %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + content + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + content + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + content | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""

ROLE_TOKENS = """{% macro head(role, name=none) %}<|im_{{ role }}|>{{ name or role }}<|im_middle|>{% endmacro %}
{%- if tools -%}{{ head('system', 'tool_declare') }}{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
  {%- if loop.first and messages[0]['role'] != 'system' -%}
  {{ head('system') }}You are helpful.<|im_end|>
  {%- endif -%}
  {{ head(message.get('role'), message.get('name')) }}
  {%- if message.content is string %}{{ message.content }}{% elif message.content %}
    {%- for part in message.content %}{{ part.get('text', '<|media|>') }}{% endfor %}
  {%- endif -%}
  {%- for call in message.get('tool_calls') or [] -%}
  <|call|>{{ call['id'] | default('call_' ~ loop.index0) }}<|args|>{{ call.function.arguments | tojson }}
  {%- endfor -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif -%}"""

STYLES = [CHATML, HERMES, XML_TOOLS, INST, ROLE_TOKENS]

_CALL = {"id": "c1", "type": "function", "function": {
    "name": "get_weather",
    "arguments": {"city": "Zürich \"<x>\"\n", "days": [1, 2.0], "deep": {"a": None, "b": True, "c": -1e-9}}}}

MESSAGES = [
    [{"role": "user", "content": "Hello 🙂 <b>\n"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
     {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}, {"role": "user", "content": "Again"}],
    [{"role": "user", "content": "Weather?"},
     {"role": "assistant", "content": None, "reasoning_content": "\nuse the tool\n", "tool_calls": [_CALL, _CALL]},
     {"role": "tool", "content": "{\"t\": 21.5}"}, {"role": "tool", "content": "rain"},
     {"role": "assistant", "content": "  21.5 degrees. "}],
    [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "image"}, {"type": "text", "text": "?"}]}],
    [{"role": "assistant", "content": "first"}, {"role": "user", "content": "x", "name": "bob"}],
    [{"role": "critic", "content": "unknown role"}],
    [],
]
