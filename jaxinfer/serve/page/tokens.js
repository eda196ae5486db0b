// The tokens of an answer, coloured by probability, from each of which the answer can be forked.

import { $, make } from "./dom.js";

const LEVELS = [0.05, 0.25, 0.5, 0.9]; // probabilities between the colours
const tip = $("tip");
let tipOwner = null; // the token that the tip describes

const readable = (text) =>
  text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ +$/, (s) => "␣".repeat(s.length));
const percent = (logProb) => {
  const share = 100 * Math.exp(logProb);
  return share >= 0.1 ? `${share.toFixed(1)} %` : "under 0.1 %";
};

/** Fills the legend of the colours. */
export function showLegend(element) {
  const bounds = [0, ...LEVELS, 1].map((share) => `${100 * share}`);
  const parts = bounds.slice(1).map((high, level) => {
    const colour = make("span", { class: `sample p${level}`, "aria-hidden": "true" });
    return make("span", {}, colour, `${bounds[level]}–${high} %`);
  });
  const thought = make("span", { class: "thought", textContent: "reasoning" });
  element.replaceChildren(make("span", { textContent: "Probability of a token" }), ...parts.reverse(), thought);
}

export class TokenView {
  /** `onFork(index)` is called when a token is chosen. */
  constructor(title, onFork) {
    this.onFork = onFork;
    this.element = make("div", { class: "tokens", role: "group", "aria-label": `Tokens: ${title}` });
    this.element.addEventListener("keydown", (event) => this.#press(event));
  }

  /** Shows the tokens that are new. */
  show(tokens) {
    const count = this.element.children.length;
    this.element.append(...tokens.slice(count).map((token, i) => this.#button(token, count + i)));
  }

  /** Returns a token as a button that breaks over lines as text does, which elements of that name cannot. */
  #button(token, index) {
    const level = LEVELS.filter((level) => Math.exp(token.logProb) >= level).length;
    const label = `${readable(token.text) || "no text"}, ${percent(token.logProb)}, fork here`;
    const kinds = ["token", `p${level}`];
    if (token.isThought) kinds.push("thought");
    if (token.text.includes("\n")) kinds.push("break");
    const button = make("span", {
      role: "button", tabIndex: index ? -1 : 0, class: kinds.join(" "), textContent: token.text, "aria-label": label,
    });
    button.addEventListener("click", () => this.onFork(index));
    for (const name of ["mouseenter", "focus"]) button.addEventListener(name, () => showTip(button, token));
    for (const name of ["mouseleave", "blur"]) button.addEventListener(name, () => hideTip(button));
    return button;
  }

  #press(event) {
    const buttons = [...this.element.children];
    const at = buttons.indexOf(document.activeElement);
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.onFork(at);
      return;
    }
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (to === undefined || !buttons[to]) return;
    event.preventDefault();
    buttons[at].tabIndex = -1;
    buttons[to].tabIndex = 0;
    buttons[to].focus();
  }
}

function showTip(button, token) {
  const table = make("table");
  const others = token.top.filter((other) => other.text !== token.text);
  for (const row of [token, ...others].sort((a, b) => b.logProb - a.logProb)) {
    const line = table.insertRow();
    line.className = row === token ? "drawn" : "";
    line.insertCell().textContent = readable(row.text) || "no text";
    line.insertCell().textContent = percent(row.logProb);
  }
  tip.replaceChildren(table);
  tip.hidden = false;
  tipOwner = button;
  placeTip();
  button.setAttribute("aria-describedby", "tip");
}

function placeTip() {
  if (tip.hidden) return;
  if (!tipOwner.isConnected) {
    tip.hidden = true;
    return;
  }
  const [place, size] = [tipOwner.getBoundingClientRect(), tip.getBoundingClientRect()];
  const below = place.bottom + 6 + size.height < innerHeight;
  tip.style.top = `${below ? place.bottom + 6 : Math.max(place.top - size.height - 6, 0)}px`;
  tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - size.width - 8))}px`;
}

// The tip stays beside its token while the page scrolls, and while text that still comes moves it.
addEventListener("scroll", placeTip, { capture: true, passive: true });
const resized = new ResizeObserver(placeTip);
for (const element of [document.body, $("panes")]) resized.observe(element);

function hideTip(button) {
  tip.hidden = true;
  button.removeAttribute("aria-describedby");
}
