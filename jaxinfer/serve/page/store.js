// Conversations and settings, kept in this browser: IndexedDB has the conversations, a short list beside them.

import { eachAnswer } from "./conversation.js";

const MAX_CONVERSATIONS = 200; // the one that was changed longest ago goes first
const MAX_IDS = 50_000; // of tokens that a conversation keeps with their alternatives
const SETTINGS = "jaxinfer-settings";

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

let opening = null;
function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("jaxinfer", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("list", { keyPath: "id" });
      request.result.createObjectStore("conversations", { keyPath: "id" });
    };
    done(request).then(resolve, reject);
  });
  return opening;
}

async function within(mode, work) {
  const transaction = (await database()).transaction(["list", "conversations"], mode);
  const [list, conversations] = ["list", "conversations"].map((name) => transaction.objectStore(name));
  const ended = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
  const [result] = await Promise.all([work(list, conversations), ended]);
  return result;
}

/** Returns the id, title and time of all conversations, the newest first. */
export async function list() {
  const entries = await within("readonly", (list) => done(list.getAll()));
  return entries.sort((a, b) => b.changed - a.changed);
}

export const load = (id) => within("readonly", (_, conversations) => done(conversations.get(id)));
export const loadAll = () => within("readonly", (_, conversations) => done(conversations.getAll()));

/** Keeps a conversation; of those that are too many, or too large for the browser, the oldest go. */
export async function save(conversation) {
  limitTokens(conversation);
  const entry = { id: conversation.id, title: conversation.title, changed: Date.now() };
  const others = (await list()).filter(({ id }) => id !== entry.id);
  await remove(others.splice(MAX_CONVERSATIONS - 1).map(({ id }) => id));
  for (;;) {
    try {
      await within("readwrite", (list, conversations) => (list.put(entry), conversations.put(conversation)));
      return;
    } catch (error) {
      if (error?.name !== "QuotaExceededError" || !others.length) throw error;
      await remove([others.pop().id]);
    }
  }
}

export async function rename(id, title) {
  await within("readwrite", async (list, conversations) => {
    for (const store of [list, conversations]) store.put({ ...(await done(store.get(id))), title });
  });
}

export async function remove(ids) {
  if (ids.length) {
    await within("readwrite", (...stores) => stores.forEach((store) => ids.forEach((id) => store.delete(id))));
  }
}

/** Forgets the tokens of the first answers, which can then not be forked any more, if there are too many. */
function limitTokens(conversation) {
  const answers = [];
  eachAnswer(conversation, (answer) => answers.unshift(answer));
  let count = 0;
  for (const answer of answers) {
    count += answer.tokens.length + (answer.promptIds?.length ?? 0);
    if (count > MAX_IDS) Object.assign(answer, { tokens: [], promptIds: null });
  }
}

export const saveSettings = (settings) => localStorage.setItem(SETTINGS, JSON.stringify(settings));

export function loadSettings() {
  try {
    return JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
  } catch {
    return {};
  }
}
