// The page: one pane, or two side by side, each with settings and a conversation of its own, and one field to write in.

import { getJson, postJson, stream } from "./api.js";
import { Answer } from "./answers.js";
import { watch } from "./live.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"];
const $ = (id) => document.getElementById(id);
const isChat = () => $("mode").value === "chat";

function notify(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

class Pane {
  constructor(name) {
    this.name = name;
    this.turns = []; // { message, answer, elements }
    this.element = $("pane").content.firstElementChild.cloneNode(true);
    this.settings = this.element.querySelector(".settings");
    this.transcript = this.element.querySelector(".transcript");
    this.element.querySelector("h2").textContent = `Settings ${name}`;
    this.transcript.setAttribute("aria-label", `Conversation ${name}`);
    this.settings.addEventListener("submit", (event) => event.preventDefault());
  }

  clear() {
    this.turns = [];
    this.transcript.replaceChildren();
  }

  get numAlternatives() {
    return Number(this.settings.elements.alternatives.value);
  }

  /** Returns the sampling fields of a body; raises Error with the pane's name. */
  fields() {
    if (!this.settings.reportValidity()) throw new Error(`Settings ${this.name}: a value is not allowed`);
    const value = (name) => this.settings.elements[name].value.trim();
    const fields = Object.fromEntries(NUMBERS.filter(value).map((name) => [name, Number(value(name))]));
    if (value("seed")) fields.seed = value("seed");
    const stop = this.settings.elements.stop.value;
    if (stop) fields.stop = stop;
    if (value("json_schema")) {
      try {
        JSON.parse(value("json_schema"));
      } catch (error) {
        throw new Error(`Settings ${this.name}: the schema is not JSON: ${error.message}`);
      }
      fields.json_schema = value("json_schema"); // as text, so that large numbers stay as they are
    }
    return fields;
  }

  async send(text, signal) {
    const fields = this.fields();
    const before = [...this.turns];
    const message = document.createElement("div");
    message.className = "message";
    message.textContent = text;
    const turn = { message: text, answer: null, elements: [message] };
    this.transcript.append(message);
    this.turns.push(turn);
    const answer = this.#newAnswer(turn, `Answer ${this.turns.length}`);
    if (isChat()) {
      const system = this.settings.elements.system.value.trim();
      const messages = system ? [{ role: "system", content: system }] : [];
      for (const turn of before) {
        messages.push({ role: "user", content: turn.message }, { role: "assistant", content: turn.answer.content });
      }
      messages.push({ role: "user", content: text });
      const asks = { logprobs: true, top_logprobs: this.numAlternatives };
      await this.#receive(answer, "/v1/chat/completions", () => ({ messages, ...asks, ...fields }), signal);
      return;
    }
    const whole = before.map((turn) => turn.message + turn.answer.content).join("") + text;
    await this.#receive(answer, "/v1/completions", async () => {
      answer.promptIds = (await postJson("/tokenize", { prompt: whole })).tokens;
      return { prompt: answer.promptIds, logprobs: this.numAlternatives, ...fields };
    }, signal);
  }

  /** Answers anew from before a token. A structure and a seed begin with an answer, so a fork has neither. */
  async fork(original, index, signal) {
    const { json_schema: schema, seed, ...fields } = this.fields();
    const at = this.turns.findIndex((turn) => turn.answer === original || turn.left?.includes(original));
    const turn = this.turns[at];
    for (const later of this.turns.splice(at + 1)) for (const element of later.elements) element.remove();
    turn.left = [...(turn.left ?? []), turn.answer];
    turn.answer.element.classList.add("left");
    const title = `Fork of token ${index + 1}${schema ? ", without the schema" : ""}`;
    const answer = this.#newAnswer(turn, title, original.tokens.slice(0, index));
    answer.promptIds = original.promptIds;
    answer.addText(...original.textOf(index));
    const prompt = [...original.promptIds, ...answer.tokens.map((token) => token.id)];
    const body = { prompt, logprobs: this.numAlternatives, ...fields };
    await this.#receive(answer, "/v1/completions", () => body, signal);
  }

  #newAnswer(turn, title, kept) {
    const answer = new Answer(title, (original, index) => run((signal) => this.fork(original, index, signal)), kept);
    turn.answer = answer;
    turn.elements.push(answer.element);
    this.transcript.insertBefore(answer.element, turn.elements.at(-2).nextSibling);
    return answer;
  }

  async #receive(answer, path, body, signal) {
    let reason = "stopped";
    try {
      const asks = { model: $("model").value, return_token_ids: true };
      for await (const chunk of stream(path, { ...asks, ...(await body()) }, signal)) {
        answer.promptIds ??= chunk.prompt_token_ids ?? null;
        for (const choice of chunk.choices) {
          const isAtEnd = this.transcript.scrollHeight - this.transcript.scrollTop - this.transcript.clientHeight < 40;
          answer.addText(choice.delta?.content ?? choice.text, choice.delta?.reasoning_content);
          answer.addTokens(choice.token_ids, choice.logprobs);
          answer.seed = choice.seed ?? answer.seed;
          reason = choice.engine_finish_reason ?? reason;
          if (isAtEnd) this.transcript.scrollTop = this.transcript.scrollHeight;
        }
      }
      answer.end(reason);
    } catch (error) {
      if (signal.aborted) answer.end("stopped");
      else {
        answer.end(error.message, true);
        this.turns = this.turns.filter((turn) => turn.answer !== answer); // the next message goes without it
        throw error;
      }
    }
  }
}

const panes = [new Pane("A"), new Pane("B")];
const shownPanes = () => ($("compare").checked ? panes : panes.slice(0, 1));
let running = null; // the AbortController of what runs

/** Runs requests of some panes, until they end or are stopped. */
async function run(work) {
  if (running) return;
  running = new AbortController();
  notify("");
  $("send").disabled = true;
  $("stop").disabled = false;
  $("state").textContent = "Answering…";
  const results = await Promise.allSettled([work(running.signal)].flat());
  const failed = results.find((result) => result.status === "rejected");
  if (failed) notify(failed.reason.message);
  $("state").textContent = running.signal.aborted ? "Stopped." : failed ? "Failed." : "Done.";
  running = null;
  $("send").disabled = false;
  $("stop").disabled = true;
}

function showPanes() {
  $("panes").replaceChildren(...shownPanes().map((pane) => pane.element));
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value;
  if (!text.trim() || running) return;
  try {
    for (const pane of shownPanes()) pane.fields();
  } catch (error) {
    notify(error.message);
    return;
  }
  $("prompt").value = "";
  run((signal) => shownPanes().map((pane) => pane.send(text, signal)));
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  for (const pane of panes) pane.clear();
  $("prompt").focus();
});
$("compare").addEventListener("change", showPanes);
$("show-tokens").addEventListener("change", () =>
  $("panes").classList.toggle("show-tokens", $("show-tokens").checked));

async function begin() {
  showPanes();
  $("panes").classList.toggle("show-tokens", $("show-tokens").checked);
  watch($("live"));
  try {
    const { data } = await getJson("/v1/models");
    $("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
  } catch (error) {
    notify(error.message);
    return;
  }
  try {
    await postJson("/tokenize", { messages: [{ role: "user", content: "a" }] });
  } catch (error) {
    $("mode").value = "text";
    notify(`No chat with this model, so the mode is plain text, which the model continues: ${error.message}`);
  }
  $("prompt").focus();
}

begin();
