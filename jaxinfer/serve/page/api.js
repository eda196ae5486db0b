// Calls of the server's API, with the key of this tab.

const KEY = "jaxinfer-key";

export class RefusedError extends Error {}

/** Asks for a key until the server takes it; all calls that wait share one question. */
let question = null;
function askKey() {
  question ??= new Promise((resolve) => {
    const dialog = document.getElementById("ask-key");
    const form = dialog.querySelector("form");
    dialog.oncancel = (event) => event.preventDefault();
    form.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, form.querySelector("input").value.trim());
      form.reset();
      dialog.close();
      question = null;
      resolve();
    };
    dialog.showModal();
  });
  return question;
}

async function send(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (options?.signal?.aborted) throw error;
    throw new RefusedError("the server does not answer; try again");
  }
}

async function request(path, options) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
    const response = await send(path, { ...options, headers });
    if (response.status === 401) {
      await askKey();
      continue;
    }
    if (!response.ok) {
      const answer = await response.json().catch(() => null);
      throw new RefusedError(answer?.error?.message ?? `${path}: status ${response.status}`);
    }
    return response;
  }
}

export const getText = async (path) => (await request(path)).text();
export const getJson = async (path) => (await request(path)).json();
export const postJson = async (path, body) =>
  (await request(path, { method: "POST", body: JSON.stringify(body) })).json();

/** Yields the chunks of a streamed answer. Seeds have 64 bits, which numbers of JavaScript have not: they are text. */
export async function* stream(path, { seed, ...body }, signal) {
  let text = JSON.stringify({ ...body, stream: true });
  if (seed) text = `${text.slice(0, -1)},"seed":${seed}}`;
  const response = await request(path, { method: "POST", body: text, signal });
  for await (const event of events(response.body)) {
    signal.throwIfAborted(); // events that have come already may follow
    if (event === "[DONE]") return;
    // A quotation mark inside a JSON string has a backslash before it, so this finds fields alone.
    const chunk = JSON.parse(event.replace(/"seed":(-?\d+)/g, '"seed":"$1"'));
    if (chunk.error) throw new RefusedError(chunk.error.message);
    yield chunk;
  }
  throw new RefusedError("the connection has ended before the answer");
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: ")) yield block.slice(6);
  }
}
