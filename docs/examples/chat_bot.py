"""A chat bot in a terminal: it streams its answers and remembers the conversation.

    python docs/examples/chat_bot.py Qwen/Qwen3-0.6B

Without a model it takes the bundled one, which only completes Python. An empty line or Ctrl-D ends it.
"""

from __future__ import annotations

import sys

from jaxinfer import LLM, SamplingParams

# For checkpoints without a chat template, as the bundled one.
PLAIN = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}def {% endif %}"
)


def template_of(llm: LLM) -> str | None:
    """Returns None if the checkpoint has a chat template, else a plain one."""
    assert llm.tokenizer is not None
    try:
        llm.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    except ValueError:
        return PLAIN
    return None


def answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Prints the answer while it comes, and returns it. The beginning of the prompt is found in the prefix cache."""
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.apply_chat_template(messages, chat_template=template_of(llm), add_generation_prompt=True)
    text = ""
    for delta in llm.stream(prompt, params):
        print(delta.text, end="", flush=True)
        text += delta.text
    print()
    return text


def main(model: str | None = None, *, max_tokens: int = 512) -> None:
    llm = LLM(model, max_num_seqs=8, max_model_len=1024)  # for the bundled model; leave limits out for another
    messages = [{"role": "system", "content": "You are brief and friendly."}]
    for line in iter(lambda: input("> "), ""):
        messages.append({"role": "user", "content": line})
        text = answer(llm, messages, SamplingParams(max_tokens=max_tokens, temperature=0.7))
        messages.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except (EOFError, KeyboardInterrupt):
        print()
