// A pane: a conversation with one model under one form of settings.

import { postJson, stream } from "./api.js";
import { AnswerView, versionButtons } from "./answers.js";
import { add, answerOf, messagesOf, newAnswer, newTurn, shownTurns, textOf, turnsBefore } from "./conversation.js";
import { copyButton, iconButton, make } from "./dom.js";
import { Receiver } from "./receiver.js";
import { Settings } from "./settings.js";

const NEAR_END = 60; // pixels from the end within which a transcript follows its text

export class Pane {
  #views = new WeakMap(); // from answers; a view is kept, for its Markdown need not be rendered again
  #running = null; // the answer that comes
  #isAtEnd = true; // of the transcript

  /** `page` has the model's `defaults` and `contextSize`, its `model`, `view` and `isChat`, and `run` and `changed`. */
  constructor(name, page) {
    this.page = page;
    this.root = null;
    this.settings = new Settings(name, () => page.settingsChanged());
    this.turns = make("div", { class: "turns" });
    const region = { class: "transcript", tabIndex: 0, role: "region", "aria-label": `Conversation ${name}` };
    this.transcript = make("div", region, this.turns);
    this.#followEnd();
    this.element = make("section", { class: "pane" }, make("h2", { textContent: `Settings ${name}` }), this.transcript);
  }

  open(root) {
    this.root = root;
    this.#isAtEnd = true;
    this.draw();
  }

  get isEmpty() {
    return !this.root?.items.length;
  }

  /** Draws the turns that are shown anew. */
  draw() {
    const turns = shownTurns(this.root);
    const { scrollTop } = this.transcript;
    this.turns.replaceChildren(...turns.flatMap((shown, index) => this.#elements(shown, index + 1)));
    this.showAnswers();
    this.transcript.scrollTop = this.#isAtEnd ? this.transcript.scrollHeight : scrollTop;
  }

  /** Shows all answers in the view that is chosen. */
  showAnswers() {
    for (const { turn } of shownTurns(this.root)) this.#showAnswer(answerOf(turn));
  }

  editLast() {
    [...this.transcript.querySelectorAll(".message .edit")].at(-1)?.click();
  }

  send(text, signal) {
    const siblings = this.isEmpty ? this.root : answerOf(shownTurns(this.root).at(-1).turn).next;
    return this.#answer(add(siblings, newTurn(text)), signal);
  }

  #showAnswer(answer) {
    this.#views.get(answer)?.show(this.page.view, answer === this.#running);
  }

  #elements({ turn, siblings }, number) {
    const message = this.#message(turn, siblings, number);
    const answer = answerOf(turn);
    if (!answer) return [message];
    if (!this.#views.has(answer)) this.#views.set(answer, this.#newView(turn, answer, `Answer ${number}`));
    const view = this.#views.get(answer);
    view.setVersions(turn.answers);
    return [message, view.element];
  }

  #newView(turn, answer, title) {
    return new AnswerView(answer, title, {
      fork: (index) => answer.promptIds && this.page.run((signal) => this.#fork(turn, answer, index, signal)),
      again: () => this.page.run((signal) => this.#answer(turn, signal)),
      choose: (index) => this.#choose(turn.answers, index),
    });
  }

  #message(turn, siblings, number) {
    const text = make("div", { class: "text", textContent: turn.message });
    const edit = iconButton("edit", "Edit message", () => this.#edit(element, turn, siblings));
    edit.classList.add("edit");
    const versions = versionButtons("message", siblings, (index) => this.#choose(siblings, index));
    const copy = copyButton("Copy message", () => turn.message);
    const actions = make("span", { class: "actions" }, ...versions, copy, edit);
    const element = make("article", { class: "message", "aria-label": `Message ${number}` }, text, actions);
    return element;
  }

  /** Puts a field in the place of a message; what is written there becomes an alternative of it. */
  #edit(element, turn, siblings) {
    const field = make("textarea", { value: turn.message, rows: 3, "aria-label": "Message" });
    const send = make("button", { type: "submit", class: "main", textContent: "Send" });
    const cancel = make("button", { type: "button", textContent: "Cancel" });
    const form = make("form", { class: "editor" }, field, make("div", { class: "row" }, send, cancel));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!field.value.trim()) return;
      this.page.run((signal) => this.#answer(add(siblings, newTurn(field.value)), signal));
    });
    cancel.addEventListener("click", () => this.draw());
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        this.draw();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    element.classList.add("editing");
    element.replaceChildren(form);
    field.focus();
  }

  #choose(alternatives, index) {
    if (this.page.isRunning) return;
    alternatives.at = index;
    this.draw();
    this.page.changed();
  }

  /** Asks for an answer to a turn, in the place of one that failed, beside others. Returns true if it has come. */
  async #answer(turn, signal) {
    const answer = this.#begin(turn, newAnswer());
    const before = turnsBefore(this.root, turn);
    const fields = this.settings.fields();
    if (this.page.isChat) {
      const system = this.settings.system ? [{ role: "system", content: this.settings.system }] : [];
      const messages = [...system, ...messagesOf(before, turn.message)];
      const asks = { logprobs: true, top_logprobs: this.settings.numAlternatives, ...this.settings.chatFields() };
      return this.#receive(answer, "/v1/chat/completions", () => ({ messages, ...asks, ...fields }), signal);
    }
    const whole = before.map((turn) => turn.message + answerOf(turn).content).join("") + turn.message;
    return this.#receive(answer, "/v1/completions", async () => {
      answer.promptIds = (await postJson("/tokenize", { prompt: whole })).tokens;
      return { prompt: answer.promptIds, ...this.#textFields(fields) };
    }, signal);
  }

  /** Answers anew from before a token. A structure and a seed begin with an answer, so a fork has neither. */
  async #fork(turn, original, index, signal) {
    const { json_schema: schema, seed, ...fields } = this.settings.fields();
    const label = `Fork of token ${index + 1}${schema ? ", without the schema" : ""}`;
    const kept = { ...textOf(original, index), tokens: original.tokens.slice(0, index), promptIds: original.promptIds };
    const answer = this.#begin(turn, { ...newAnswer(label), ...kept });
    const prompt = [...original.promptIds, ...kept.tokens.map((token) => token.id)];
    return this.#receive(answer, "/v1/completions", () => ({ prompt, ...this.#textFields(fields) }), signal);
  }

  #textFields(fields) {
    // A completion that does not say how long it may be is short in OpenAI's API.
    const most = this.page.defaults.max_tokens === null ? { max_tokens: -1 } : {};
    return { logprobs: this.settings.numAlternatives, ...most, ...fields };
  }

  #begin(turn, answer) {
    const failed = turn.answers.items.filter(({ error }) => error !== null);
    turn.answers.items = turn.answers.items.filter((other) => !failed.includes(other));
    this.#running = add(turn.answers, answer);
    this.#isAtEnd = true;
    this.draw();
    this.page.changed();
    return answer;
  }

  async #receive(answer, path, body, signal) {
    const receiver = new Receiver(answer, this.page.contextSize);
    const asks = { model: this.page.model, return_token_ids: true };
    try {
      for await (const chunk of stream(path, { ...asks, ...(await body()) }, signal)) {
        receiver.take(chunk);
        this.#showAnswer(answer);
        this.page.changed();
      }
    } catch (error) {
      answer.end = "stopped";
      if (!signal.aborted) answer.error = error.message; // shown in its place, with the way to try again
    }
    answer.end ??= "stopped";
    this.#running = null;
    this.#showAnswer(answer);
    this.page.changed();
    return answer.error === null;
  }

  /** Keeps the end of the transcript in sight while it grows, unless the reader has scrolled away from it. */
  #followEnd() {
    const { transcript } = this;
    const distance = () => transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight;
    let last = 0;
    transcript.addEventListener("scroll", () => {
      if (distance() < NEAR_END) this.#isAtEnd = true;
      else if (transcript.scrollTop < last) this.#isAtEnd = false; // growing text alone does not scroll back
      last = transcript.scrollTop;
    }, { passive: true });
    transcript.addEventListener("click", (event) => {
      if (event.target.closest("summary")) this.#isAtEnd = false; // which opens below what is read
    }, { capture: true });
    const observer = new ResizeObserver(() => {
      if (this.#isAtEnd) transcript.scrollTop = transcript.scrollHeight;
    });
    for (const element of [transcript, this.turns]) observer.observe(element);
  }
}
