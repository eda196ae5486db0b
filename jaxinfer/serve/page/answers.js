// An answer on the page: its text, and its tokens coloured by probability, from each of which it can be forked.

const LEVELS = [0.05, 0.25, 0.5, 0.9]; // probabilities between the colours
const tip = document.getElementById("tip");
let tipOwner = null; // the token that the tip describes

const readable = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ +$/, (s) => "␣".repeat(s.length));
const percent = (logProb) => {
  const share = 100 * Math.exp(logProb);
  return share >= 0.1 ? `${share.toFixed(1)} %` : "under 0.1 %";
};

export class Answer {
  /** `onFork(answer, index)` is called when a token is chosen; `kept` tokens were there before this answer's request. */
  constructor(title, onFork, kept = []) {
    this.title = title;
    this.onFork = onFork;
    this.promptIds = null; // without them there is no fork
    this.tokens = []; // { id, text, logProb, top: [{ text, logProb }] }
    [this.reasoning, this.content, this.seed] = ["", "", null];
    this.decoder = new TextDecoder();
    this.element = document.createElement("article");
    this.element.className = "answer";
    this.element.setAttribute("aria-label", title);
    const part = (name, className) => {
      const element = document.createElement(name);
      element.className = className;
      this.element.append(element);
      return element;
    };
    this.reasoningElement = part("div", "text reasoning");
    this.textElement = part("div", "text");
    this.tokensElement = part("div", "tokens");
    this.aboutElement = part("p", "quiet about");
    this.aboutElement.textContent = title;
    this.tokensElement.setAttribute("role", "group");
    this.tokensElement.setAttribute("aria-label", `Tokens: ${title}`);
    this.tokensElement.addEventListener("keydown", (event) => this.#move(event));
    for (const token of kept) this.#addToken(token);
  }

  addText(content = "", reasoning = "") {
    this.content += content;
    this.reasoning += reasoning;
    this.textElement.textContent = this.content;
    this.reasoningElement.textContent = this.reasoning;
  }

  /** Adds the tokens of a chunk's choice, of a chat or of a text. */
  addTokens(ids, logProbs) {
    if (!ids || !logProbs) return;
    const rows = logProbs.content ?? logProbs.tokens.map((token, i) => ({
      token,
      logprob: logProbs.token_logprobs[i],
      top_logprobs: Object.entries(logProbs.top_logprobs?.[i] ?? {}).map(([token, logprob]) => ({ token, logprob })),
    }));
    ids.forEach((id, i) => {
      const { token, bytes, logprob, top_logprobs: top } = rows[i];
      // A character may have its bytes in several tokens; the last of them shows it.
      const text = bytes ? this.decoder.decode(new Uint8Array(bytes), { stream: true }) : token;
      this.#addToken({ id, text, logProb: logprob, top: top.map((t) => ({ text: t.token, logProb: t.logprob })) });
    });
  }

  /** Returns what the first `count` tokens add to reasoning and content; special tokens are not part of these. */
  textOf(count) {
    const whole = this.reasoning + this.content;
    let end = 0;
    for (const { text } of this.tokens.slice(0, count)) if (whole.startsWith(text, end)) end += text.length;
    return [whole.slice(this.reasoning.length, Math.max(end, this.reasoning.length)), this.reasoning.slice(0, end)];
  }

  /** Says how the answer ended. */
  end(reason, isError = false) {
    const seed = this.seed === null ? "" : ` · seed ${this.seed}`;
    this.aboutElement.textContent = `${this.title} · ${reason}${seed}`;
    this.aboutElement.classList.toggle("error", isError);
  }

  #addToken(token) {
    const index = this.tokens.push(token) - 1;
    const button = document.createElement("button");
    button.type = "button";
    button.tabIndex = index ? -1 : 0;
    const probability = Math.exp(token.logProb);
    button.className = `p${LEVELS.filter((level) => probability >= level).length}`;
    button.textContent = token.text;
    button.setAttribute("aria-label", `${readable(token.text) || "no text"}, ${percent(token.logProb)}, fork here`);
    button.addEventListener("click", () => this.promptIds && this.onFork(this, index));
    for (const name of ["mouseenter", "focus"]) button.addEventListener(name, () => showTip(button, token));
    for (const name of ["mouseleave", "blur"]) button.addEventListener(name, () => hideTip(button));
    this.tokensElement.append(button);
  }

  #move(event) {
    const buttons = [...this.tokensElement.children];
    const at = buttons.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (to === undefined || !buttons[to]) return;
    event.preventDefault();
    buttons[at].tabIndex = -1;
    buttons[to].tabIndex = 0;
    buttons[to].focus();
  }
}

function showTip(button, token) {
  const table = document.createElement("table");
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
  const [place, size] = [tipOwner.getBoundingClientRect(), tip.getBoundingClientRect()];
  const below = place.bottom + 6 + size.height < innerHeight;
  tip.style.top = `${below ? place.bottom + 6 : Math.max(place.top - size.height - 6, 0)}px`;
  tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - size.width - 8))}px`;
}

// The tip stays beside its token while the page scrolls, and while text that still comes moves it.
addEventListener("scroll", placeTip, { capture: true, passive: true });
new ResizeObserver(placeTip).observe(document.body);

function hideTip(button) {
  tip.hidden = true;
  button.removeAttribute("aria-describedby");
}
