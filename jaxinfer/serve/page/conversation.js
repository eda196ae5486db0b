// A conversation as a tree, so that nothing is lost when a message is edited or an answer drawn again.
//
//   alternatives of turns ──> turn: message, alternatives of answers ──> answer: text, alternatives of turns ──> …
//
// Of each alternatives one is shown. All of it is plain values, which the browser stores.

const alternatives = () => ({ items: [], at: -1 });
const chosen = ({ items, at }) => items[at];

export function add(alternatives, item) {
  alternatives.at = alternatives.items.push(item) - 1;
  return item;
}

export const newTurn = (message) => ({ message, answers: alternatives() });

/** Returns an answer with no text yet; `end` says how it ended, and `error` why it failed. */
export function newAnswer(label = "") {
  const text = { content: "", reasoning: "", calls: [], tokens: [], promptIds: null };
  return { label, ...text, seed: null, speed: null, end: null, error: null, next: alternatives() };
}

export function newConversation() {
  const id = crypto.getRandomValues(new Uint32Array(3)).join("-");
  return { id, title: "", mode: "chat", roots: [alternatives(), alternatives()] };
}

export const answerOf = (turn) => chosen(turn.answers);

/** Returns the turns that are shown, each with its alternatives, `siblings`. */
export function shownTurns(root) {
  const found = [];
  for (let siblings = root; siblings && chosen(siblings); siblings = answerOf(found.at(-1).turn)?.next) {
    found.push({ turn: chosen(siblings), siblings });
  }
  return found;
}

/** Returns the turns before one that have an answer; those that failed are not part of the conversation. */
export function turnsBefore(root, turn) {
  const turns = shownTurns(root).map((shown) => shown.turn);
  return turns.slice(0, turns.indexOf(turn)).filter((before) => answerOf(before) && answerOf(before).error === null);
}

/** Returns some turns and a message after them as the API has them. What follows a single call is its result. */
export function messagesOf(turns, message) {
  const said = (content, calls) =>
    calls.length === 1 ? { role: "tool", tool_call_id: calls[0].id, content } : { role: "user", content };
  const messages = [];
  let calls = [];
  for (const turn of turns) {
    messages.push(said(turn.message, calls));
    const { content, calls: called } = answerOf(turn);
    const shown = called.map(({ id, ...called }) => ({ id, type: "function", function: called }));
    messages.push({ role: "assistant", content, ...(shown.length && { tool_calls: shown }) });
    calls = called;
  }
  return [...messages, said(message, calls)];
}

/** Returns what the first `count` tokens add to content and reasoning; special tokens are not part of these. */
export function textOf({ content, reasoning, tokens }, count) {
  const whole = reasoning + content;
  let end = 0;
  for (const { text } of tokens.slice(0, count)) if (whole.startsWith(text, end)) end += text.length;
  const kept = whole.slice(reasoning.length, Math.max(end, reasoning.length));
  return { content: kept, reasoning: reasoning.slice(0, end) };
}

/** Calls a function with every answer of a conversation, also of those that are not shown. */
export function eachAnswer(conversation, call) {
  const todo = [...conversation.roots];
  while (todo.length) {
    for (const answer of todo.pop().items.flatMap((turn) => turn.answers.items)) {
      call(answer);
      todo.push(answer.next);
    }
  }
}

/** Returns a copy without tokens, which are most of a conversation's bytes. */
export function withoutTokens(conversation) {
  const copy = structuredClone(conversation);
  eachAnswer(copy, (answer) => Object.assign(answer, { tokens: [], promptIds: null }));
  return copy;
}

/** Returns a conversation from a file, with nothing but known fields; raises Error if it is none. */
export function readConversation(given) {
  const text = (value) => (typeof value === "string" ? value : "");
  const number = (value) => (Number.isFinite(value) ? value : null);
  const readAll = (from, read) => {
    if (!Array.isArray(from?.items)) throw new Error("a conversation in the file has another form");
    const items = from.items.map(read);
    return { items, at: items.length ? Math.min(Math.max(Math.trunc(number(from.at) ?? 0), 0), items.length - 1) : -1 };
  };
  const readCall = (call) => ({ id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments) });
  const names = ["tokens", "first", "rate", "used", "whole", "thought"];
  const readSpeed = (speed) => speed && Object.fromEntries(names.map((name) => [name, number(speed[name])]));
  const readAnswer = (answer) => ({
    ...newAnswer(text(answer?.label)),
    content: text(answer?.content),
    reasoning: text(answer?.reasoning),
    calls: Array.isArray(answer?.calls) ? answer.calls.map(readCall) : [],
    seed: text(answer?.seed) || null,
    speed: readSpeed(answer?.speed ?? null),
    end: text(answer?.end) || "stopped",
    error: text(answer?.error) || null,
    next: readAll(answer?.next, readTurn),
  });
  const readTurn = (turn) => ({ message: text(turn?.message), answers: readAll(turn?.answers, readAnswer) });
  if (!Array.isArray(given?.roots) || given.roots.length !== 2) {
    throw new Error("the file has no conversations of this page");
  }
  const mode = given.mode === "text" ? "text" : "chat";
  const roots = given.roots.map((root) => readAll(root, readTurn));
  return { ...newConversation(), title: text(given.title) || "Imported", mode, roots };
}
