// The list of the conversations that this browser keeps.

import { newConversation, readConversation, withoutTokens } from "./conversation.js";
import { $, iconButton, make } from "./dom.js";
import * as store from "./store.js";

const KIND = "jaxinfer conversations";
const MAX_FILE_BYTES = 2 ** 26;

export class History {
  /** `page` has the current conversation's `id`, and `open(conversation)`, `renamed(title)` and `notify(text)`. */
  constructor(page) {
    this.page = page;
    $("export").addEventListener("click", () => this.#try(() => this.#export()));
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.#try(() => this.#import()));
    $("delete-all").addEventListener("click", () => this.#try(() => this.#deleteAll()));
  }

  /** Draws the list anew. */
  async show() {
    const entries = await store.list();
    $("conversations").replaceChildren(...entries.map((entry) => this.#item(entry)));
    $("no-conversations").hidden = entries.length > 0;
  }

  async #try(work) {
    try {
      await work();
    } catch (error) {
      this.page.notify(error.message);
    }
  }

  #item({ id, title }) {
    const isCurrent = id === this.page.id;
    const open = make("button", { type: "button", class: "open", textContent: title, title });
    if (isCurrent) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => this.#try(async () => this.page.open(await store.load(id))));
    const item = make("li", { class: isCurrent ? "current" : "" }, open);
    item.append(
      iconButton("edit", `Rename ${title}`, () => this.#rename(item, id, title)),
      iconButton("delete", `Delete ${title}`, () => this.#try(() => this.#delete(id, title))));
    return item;
  }

  #rename(item, id, title) {
    const field = make("input", { value: title, maxLength: 200, "aria-label": "Name of the conversation" });
    const form = make("form", {}, field);
    const end = async (name) => {
      if (form.isConnected && name) {
        await store.rename(id, name);
        if (id === this.page.id) this.page.renamed(name);
      }
      await this.show();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#try(() => end(field.value.trim()));
    });
    field.addEventListener("blur", () => this.#try(() => end("")));
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.#try(() => end(""));
    });
    item.replaceChildren(form);
    field.select();
  }

  async #delete(id, title) {
    if (!confirm(`Delete “${title}” from this browser?`)) return;
    if (id === this.page.id) await this.page.open(newConversation()); // which still keeps what ran
    await store.remove([id]);
    await this.show();
  }

  async #deleteAll() {
    const ids = (await store.list()).map(({ id }) => id);
    if (!ids.length || !confirm(`Delete all ${ids.length} conversations from this browser?`)) return;
    await this.page.open(newConversation());
    await store.remove(ids);
    await this.show();
  }

  async #export() {
    const conversations = (await store.loadAll()).map(withoutTokens);
    const content = JSON.stringify({ kind: KIND, conversations });
    const url = URL.createObjectURL(new Blob([content], { type: "application/json" }));
    make("a", { href: url, download: "jaxinfer-conversations.json" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  async #import() {
    const [file] = $("import-file").files;
    $("import-file").value = ""; // so that the same file may be chosen again
    if (!file) return;
    if (file.size > MAX_FILE_BYTES) throw new Error(`the file has more than ${MAX_FILE_BYTES >> 20} MiB`);
    const { kind, conversations } = JSON.parse(await file.text().catch(() => "null")) ?? {};
    if (kind !== KIND || !Array.isArray(conversations)) throw new Error("the file has no conversations of this page");
    const read = conversations.map(readConversation); // all of them, before any is kept
    for (const conversation of read) await store.save(conversation);
    await this.show();
  }
}
