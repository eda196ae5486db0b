// Takes the chunks of a streamed answer: its text, reasoning, calls of tools and tokens, and how fast they come.

export class Receiver {
  #began = performance.now();
  #decoder = new TextDecoder();
  #isThought = false;
  #numFirst = 0; // tokens of the first chunk that had some
  #numNew = 0;

  constructor(answer, contextSize) {
    this.answer = answer;
    answer.speed = { tokens: 0, first: null, rate: null, used: null, whole: contextSize, thought: null };
  }

  take(chunk) {
    this.answer.promptIds ??= chunk.prompt_token_ids ?? null;
    for (const choice of chunk.choices) {
      this.#takeText(choice.delta ?? { content: choice.text });
      this.#takeTokens(choice.token_ids ?? [], choice.logprobs);
      this.answer.seed = choice.seed ?? this.answer.seed;
      this.answer.end = choice.engine_finish_reason ?? this.answer.end;
    }
  }

  #takeText({ content, reasoning_content: reasoning, tool_calls: calls = [] }) {
    const { answer } = this;
    if (reasoning) this.#isThought = true;
    if (this.#isThought) answer.speed.thought = performance.now() - this.#began - (answer.speed.first ?? 0);
    if (content || calls.length) this.#isThought = false;
    answer.reasoning += reasoning ?? "";
    answer.content += content ?? "";
    for (const { index, id, function: called } of calls) {
      const call = (answer.calls[index] ??= { id, name: called.name, arguments: "" });
      call.arguments += called.arguments;
    }
  }

  /** Adds the tokens of a choice, of a chat or of a text. */
  #takeTokens(ids, logProbs) {
    if (!ids.length) return;
    this.#count(ids.length);
    if (!logProbs) return;
    const rows = logProbs.content ?? logProbs.tokens.map((token, i) => ({
      token,
      logprob: logProbs.token_logprobs[i],
      top_logprobs: Object.entries(logProbs.top_logprobs?.[i] ?? {}).map(([token, logprob]) => ({ token, logprob })),
    }));
    ids.forEach((id, i) => {
      const { token, bytes, logprob, top_logprobs: top } = rows[i];
      // A character may have its bytes in several tokens; the last of them shows it.
      const text = bytes ? this.#decoder.decode(new Uint8Array(bytes), { stream: true }) : token;
      const alternatives = top.map((t) => ({ text: t.token, logProb: t.logprob }));
      this.answer.tokens.push({ id, text, logProb: logprob, top: alternatives, isThought: this.#isThought });
    });
  }

  #count(count) {
    const { speed, promptIds, tokens } = this.answer;
    const milliseconds = performance.now() - this.#began;
    this.#numNew += count;
    if (speed.first === null) {
      speed.first = milliseconds;
      this.#numFirst = count;
    } else {
      speed.rate = (1000 * (this.#numNew - this.#numFirst)) / (milliseconds - speed.first);
    }
    speed.tokens = tokens.length + count;
    speed.used = promptIds && promptIds.length + speed.tokens;
  }
}
