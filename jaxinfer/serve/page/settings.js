// The settings of a pane: a form, whose empty fields leave the model's defaults.

import { $ } from "./dom.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens",
];

export class Settings {
  constructor(name, onChange) {
    this.name = name;
    this.element = $("settings-form").content.firstElementChild.cloneNode(true);
    this.form = this.element.querySelector("form");
    this.element.querySelector("summary").textContent = `Settings ${name}`;
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", onChange);
    this.form.querySelector(".reset").addEventListener("click", () => {
      this.form.reset();
      onChange();
    });
  }

  #text(name) {
    return this.form.elements[name].value.trim();
  }

  get numAlternatives() {
    return Number(this.#text("alternatives"));
  }

  get system() {
    return this.#text("system");
  }

  /** Shows the model's defaults in the fields that are empty. */
  showDefaults({ max_tokens: most, ...defaults }) {
    for (const [name, value] of Object.entries(defaults)) {
      if (this.form.elements[name]) this.form.elements[name].placeholder = value;
    }
    this.form.elements.max_tokens.placeholder = most ?? "all that fit";
  }

  get values() {
    const named = [...this.form.elements].filter(({ name }) => name);
    return Object.fromEntries(named.map(({ name, value }) => [name, value]));
  }

  set values(values) {
    for (const [name, value] of Object.entries(values ?? {})) {
      if (this.form.elements[name]?.name === name) this.form.elements[name].value = value;
    }
  }

  /** Returns the sampling fields of any body; raises Error with the pane's name. */
  fields() {
    this.#require(this.form.checkValidity(), "a value is not allowed");
    const given = NUMBERS.filter((name) => this.#text(name));
    const fields = Object.fromEntries(given.map((name) => [name, Number(this.#text(name))]));
    if (this.#text("seed")) fields.seed = this.#text("seed");
    const stop = this.form.elements.stop.value;
    if (stop) fields.stop = stop;
    const schema = this.#json("json_schema", "the schema");
    if (schema !== undefined) fields.json_schema = this.#text("json_schema"); // as text, so that large numbers stay
    return fields;
  }

  /** Returns the fields of a chat's body alone. */
  chatFields() {
    const tools = this.#json("tools", "the list of tools");
    this.#require(tools === undefined || Array.isArray(tools), "the tools are not a list");
    const effort = this.#text("reasoning_effort");
    return { ...(tools && { tools }), ...(effort && { reasoning_effort: effort }) };
  }

  /** Raises Error with the pane's name if a value is not allowed. */
  check() {
    this.fields();
    this.chatFields();
  }

  #json(name, what) {
    try {
      return this.#text(name) ? JSON.parse(this.#text(name)) : undefined;
    } catch (error) {
      return this.#require(false, `${what} is not JSON: ${error.message}`);
    }
  }

  #require(isRight, message) {
    if (!isRight) throw new Error(`Settings ${this.name}: ${message}`);
  }
}
