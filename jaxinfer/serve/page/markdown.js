// The HTML of an answer's Markdown, which the server renders. While an answer comes, it is asked a few times a second.

import { postJson } from "./api.js";
import { copyButton } from "./dom.js";

const INTERVAL = 300; // milliseconds between two renderings of an answer that comes
const LOAD = 4; // times as long as a rendering took, the next one waits

let isOn = true;
/** Says that the server has no renderer, so that answers are shown as they are. */
export const switchOff = () => (isOn = false);

let last = Promise.resolve();
/** Renders one text after the other: the server lets only some of a client's wait. */
function render(text) {
  const rendered = last.then(() => postJson("/page/markdown", { text }));
  last = rendered.catch(() => null);
  return rendered;
}

/** Shows a text that may grow as HTML in an element. `onPlain(reason)` says that it cannot; with null, that it can. */
export class MarkdownView {
  #wanted = "";
  #shown = "";
  #isBusy = false;
  #isFinal = false;
  #hasFailed = false;
  #wake = () => null;

  constructor(element, onPlain) {
    this.element = element;
    this.onPlain = onPlain;
  }

  show(text, isFinal) {
    if (!isOn) return this.onPlain("");
    [this.#wanted, this.#isFinal] = [text, isFinal];
    if (isFinal) this.#wake();
    if (!this.#isBusy) this.#follow();
  }

  async #follow() {
    this.#isBusy = true;
    // After a failure only the whole answer is tried once more.
    while (this.#wanted !== this.#shown && (this.#isFinal || !this.#hasFailed)) {
      const [text, isFinal, began] = [this.#wanted, this.#isFinal, performance.now()];
      try {
        this.#put((await render(text)).html);
        this.onPlain(null);
        [this.#shown, this.#hasFailed] = [text, false];
      } catch (error) {
        this.#hasFailed = true;
        this.onPlain(isFinal ? error.message : "");
        if (isFinal) break;
      }
      if (!this.#isFinal) await this.#pause(Math.max(INTERVAL, LOAD * (performance.now() - began)));
    }
    this.#isBusy = false;
  }

  #pause(milliseconds) {
    return new Promise((resolve) => {
      this.#wake = resolve;
      setTimeout(resolve, milliseconds);
    });
  }

  #put(html) {
    this.element.innerHTML = html; // without scripts, images and foreign elements: the server escapes these
    for (const figure of this.element.querySelectorAll("figure.code")) {
      const button = copyButton("Copy code", () => figure.querySelector("code").textContent);
      figure.querySelector("figcaption").append(button);
    }
  }
}
