"""Chat templates with the constructs of those that models are published with, written for these tests."""

# Llama 3: headers, a date, a system message with tools, tool calls as JSON, `ipython` for their results.
HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|head|>system<|end|>\\n\\n" }}{{- "Today: " + date_string + "\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system }}{{- "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}" }}
    {%- else %}
        {{- "<|head|>ipython<|end|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|end|>\\n\\n' }}{%- endif %}"""

# Qwen3: ChatML, a namespace that a reversed loop sets, reasoning cut from older answers, tool results in one message.
CHATML = """{%- if tools %}{{- '<|im_start|>system\\n' }}{{- "<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string
        and not(message.content.startswith('<result>') and message.content.endswith('</result>')) %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
        {%- if message.tool_calls %}{%- for call in message.tool_calls %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<call>{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}</call>' }}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<result>\\n' }}{{- content }}{{- '\\n</result>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# Mistral: instructions in brackets, the system message before the last one, roles that have to alternate.
BRACKETS = """{%- if messages[0]["role"] == "system" %}{%- set system = messages[0]["content"] %}
{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) and message.role != "tool"
        and not message.tool_calls %}
        {{- raise_exception("roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == users[-1]) %}{{- "[TOOLS] [" }}
            {%- for tool in tools %}{%- set tool = tool.function %}{{- '{"name": "' + tool.name + '", ' }}
                {%- for key, value in tool.items() if key != "name" %}
                    {%- if value is string %}{{- '"' + key + '": "' + value + '"' }}
                    {%- else %}{{- '"' + key + '": ' + value|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}{{- "}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}{{- "[/TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system is defined %}{{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message["role"] == "assistant" and message.content is defined %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- endif %}
{%- endfor %}"""

# Gemma 3: the system message goes into the first turn, the assistant is called "model", contents may be lists.
TURNS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set rest = messages[1:] -%}
{%- else -%}{%- set prefix = "" -%}{%- set rest = messages -%}{%- endif -%}
{%- for message in rest if message['role'] in ['user', 'assistant'] -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}
    {%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}{{ '</turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<turn>model\\n'}}{%- endif -%}"""

# GPT-OSS: macros that write types, the date by strftime_now, `continue` and `break` in loops.
MACROS = """{%- macro type_of(spec, required=true) -%}
    {%- if spec.type == "array" -%}{{ type_of(spec["items"]) }}[]
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string -%}{{ spec.type | join(" | ") }}
    {%- elif spec.enum -%}{{ '"' + spec.enum | join('" | "') + '"' }}
    {%- else -%}{{ spec.type | default("any") }}{%- endif -%}{%- if not required %} | null{% endif -%}
{%- endmacro -%}
{{ "<|start|>system<|message|>Date: " + strftime_now("%Y-%m") + "\\n" }}
{{- "Reasoning: " + (effort | default("medium")) }}
{%- if tools %}{{ "\\nnamespace functions {\\n" }}{%- for tool in tools %}{%- set f = tool.function %}
{{ "// " ~ f.description ~ "\\ntype " ~ f.name ~ " = (_: {\\n" }}
    {%- for name, spec in (f.parameters.properties | default({})).items() %}
        {{- name ~ ("" if name in (f.parameters.required or []) else "?") ~ ": " }}{{ type_of(spec) ~ ",\\n" }}
    {%- endfor %}{{ "}) => any;" }}{%- endfor %}{{ "\\n}" }}{%- endif %}{{ "<|end|>" }}
{%- set last = namespace(answer=none) %}
{%- for message in messages %}{%- if message.role == 'system' %}{%- continue %}{%- endif %}
    {%- if message.role == "assistant" and message.thinking is defined %}
        {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
    {%- endif %}
    {%- if message.content is defined and message.content is string %}
        {{- "<|start|>" ~ message.role ~ "<|message|>" ~ message.content ~ "<|end|>" }}{%- endif %}
{%- endfor %}
{%- for message in messages | reverse %}{%- if message.role == "user" %}{%- set last.answer = loop.index %}{%- break %}
{%- endif %}{%- endfor %}{{ "(" ~ last.answer ~ ")" }}
{%- if add_generation_prompt %}<|start|>assistant{%- endif -%}"""

# Granite: documents, a filter chain, call blocks; SmolLM3: training marks around what the assistant said.
DOCUMENTS = """{%- macro document(d) %}{{ '[' ~ d.title | default('untitled', true) | upper ~ ']' }}
{{ caller() }}{% endmacro %}
{%- set user = messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | first %}
{{- eos_token if false else '' }}{{ 'Q: ' ~ user | replace('\\n', ' ') | truncate(40) }}
{% if documents %}{% for d in documents %}{% call document(d) %}{{ d.text | indent(2) | wordwrap(30) }}{% endcall %}
{% endfor %}{% endif %}
{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}
{% elif m.role == 'user' %}{{ loop.index }}/{{ loop.length }} {{ m.content | e if false else m.content }}
{% endif %}{% endfor %}
{{ [3, 1, 2] | sort | join(',') }} {{ {'b': 1, 'a': 'é'} | tojson(sort_keys=true, ensure_ascii=true) }}
{{ {'a': [1, 2]} | tojson(separators=(',', ':')) }}{% if add_generation_prompt %}A:{% endif %}"""

# DeepSeek: one namespace for everything, tool calls that open and close once, `</think>` cut from answers.
STATE = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=true, is_tool=false, system='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- if ns.is_first %}{% set ns.system = ns.system + message['content'] %}{% set ns.is_first = false %}
{%- else %}{% set ns.system = ns.system + '\\n\\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<User>' + message['content']}}{%- endif %}
    {%- if message['role'] == 'assistant' and 'tool_calls' in message %}{%- set ns.is_tool = false -%}
        {%- for call in message['tool_calls'] %}
            {{- ('<calls>' if loop.first else '\\n') + call['type'] + ':' + call['function']['name'] }}
            {{- '\\n```json\\n' + (call['function']['arguments'] | tojson) + '\\n```' }}
        {%- endfor %}{{- '</calls>' }}{%- endif %}
    {%- if message['role'] == 'assistant' and 'tool_calls' not in message and message['content'] is not none %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- ('<end>' if ns.is_tool else '<Assistant>') + content + eos_token }}{%- set ns.is_tool = false -%}
    {%- endif %}
    {%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{{- '<out>' + message['content'] }}{%- endif %}
{%- endfor -%}
{% if ns.is_tool %}{{'<end>'}}{% endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{'<Assistant><think>\\n'}}{% endif %}"""

TEMPLATES = {
    "headers": HEADERS,
    "chatml": CHATML,
    "brackets": BRACKETS,
    "turns": TURNS,
    "macros": MACROS,
    "documents": DOCUMENTS,
    "state": STATE,
}
