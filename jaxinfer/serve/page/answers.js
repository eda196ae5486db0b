// An answer on the page: its reasoning, its text as Markdown, as it is or as tokens, its speed, and its buttons.

import { copyButton, iconButton, make } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { TokenView } from "./tokens.js";

const ENDS = { stop: "", length: "ended at its length limit", exhausted: "", stopped: "stopped" };
const count = (number) => number.toLocaleString("en");
const seconds = (milliseconds) =>
  milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;

/** Returns the buttons that show another one of some alternatives; none if there is one alone. */
export function versionButtons(kind, { items, at }, onChoose) {
  if (items.length < 2) return [];
  const button = (name, label, to) => {
    const made = iconButton(name, label, () => onChoose(to));
    made.disabled = !items[to];
    return made;
  };
  const place = make("span", { class: "quiet version", textContent: `${at + 1} of ${items.length}` });
  return [button("left", `Previous ${kind}`, at - 1), place, button("right", `Next ${kind}`, at + 1)];
}

export class AnswerView {
  /** `actions` has the functions `fork(index)`, `again()` and `choose(index)`. */
  constructor(answer, title, actions) {
    [this.answer, this.actions] = [answer, actions];
    this.reasoning = make("div", { class: "text" });
    this.reasoningTitle = make("summary");
    this.thoughts = make("details", { class: "reasoning", hidden: true }, this.reasoningTitle, this.reasoning);
    this.formatted = make("div", { class: "formatted" });
    this.plain = make("div", { class: "plain text" });
    this.note = make("p", { class: "quiet note", hidden: true });
    this.tokens = new TokenView(title, actions.fork);
    this.calls = make("div", { class: "calls" });
    this.error = make("p", { class: "error", role: "alert", hidden: true });
    this.about = make("span", { class: "quiet about" });
    this.retry = make("button", { type: "button", class: "retry", textContent: "Retry" });
    this.retry.addEventListener("click", actions.again);
    this.versions = make("span", { class: "row" });
    const copy = copyButton("Copy answer", () => answer.content);
    const again = iconButton("again", "Answer again", actions.again);
    this.buttons = make("span", { class: "actions" }, this.versions, copy, again);
    this.markdown = new MarkdownView(this.formatted, (reason) => this.#showPlain(reason));
    const texts = [this.thoughts, this.formatted, this.plain, this.note, this.tokens.element, this.calls];
    const failure = make("div", { class: "failure" }, this.error, this.retry);
    const footer = make("footer", {}, this.buttons, this.about);
    this.element = make("article", { class: "answer unformatted", "aria-label": title }, ...texts, failure, footer);
  }

  setVersions(versions) {
    this.versions.replaceChildren(...versionButtons("answer", versions, this.actions.choose));
  }

  /** Shows the answer as it is now in one of the views "formatted", "plain" and "tokens". */
  show(view, isRunning) {
    const { content, reasoning, tokens, error } = this.answer;
    this.element.classList.toggle("running", isRunning);
    this.plain.textContent = content;
    this.#showReasoning(isRunning);
    if (view === "formatted") this.markdown.show(content, !isRunning);
    if (view === "tokens") this.tokens.show(tokens);
    this.element.classList.toggle("no-tokens", !tokens.length);
    this.element.classList.toggle("failed", error !== null && !content);
    this.#showCalls();
    this.error.hidden = this.retry.hidden = error === null;
    this.error.textContent = error ?? "";
    this.about.textContent = this.#describe(isRunning);
    this.thoughts.hidden = !reasoning;
  }

  #showCalls() {
    const { calls } = this.answer;
    const hint = make("p", { class: "quiet", textContent: "Your next message is sent as the result of this call." });
    this.calls.replaceChildren(...calls.map(callCard), ...(calls.length === 1 ? [hint] : []));
  }

  #showReasoning(isRunning) {
    const { reasoning, content, speed } = this.answer;
    this.reasoning.textContent = reasoning;
    const title = isRunning && !content ? "Reasoning…" : "Reasoning";
    const time = speed?.thought ? ` · ${seconds(speed.thought)}` : "";
    this.reasoningTitle.textContent = `${title} · ${count(reasoning.length)} characters${time}`;
  }

  #showPlain(reason) {
    this.element.classList.toggle("unformatted", reason !== null);
    this.note.hidden = !reason;
    this.note.textContent = reason ? `Shown without its format: ${reason}` : "";
  }

  #describe(isRunning) {
    const { label, speed, end, seed, error } = this.answer;
    const parts = [label];
    if (isRunning && !speed?.tokens) parts.push("Waiting for the first token…");
    if (speed?.tokens) parts.push(`${count(speed.tokens)} token${speed.tokens === 1 ? "" : "s"}`);
    if (speed?.rate) parts.push(`${speed.rate.toFixed(1)} tokens/s`);
    if (speed?.first) parts.push(`first after ${seconds(speed.first)}`);
    if (speed?.used) parts.push(`context ${count(speed.used)} of ${count(speed.whole)}`);
    if (end && error === null) parts.push(ENDS[end] ?? end);
    if (seed !== null) parts.push(`seed ${seed}`);
    return parts.filter(Boolean).join(" · ");
  }
}

function callCard({ name, arguments: text }) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // The arguments have not come whole, or are not JSON.
  }
  const title = make("figcaption", {}, make("span", {}, "Calls ", make("b", { textContent: name })));
  title.append(copyButton("Copy arguments", () => text));
  const code = make("pre", { tabIndex: 0 }, make("code", { textContent: shown }));
  return make("figure", { class: "code call" }, title, code);
}
