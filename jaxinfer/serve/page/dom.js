// Elements, icons and copying.

export const $ = (id) => document.getElementById(id);

/** Returns a new element with some properties; `class` and names with a hyphen are attributes. */
export function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class" || key.includes("-")) element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children);
  return element;
}

function icon(name) {
  const [svg, use] = ["svg", "use"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
  use.setAttribute("href", `#icon-${name}`);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

/** Returns a button with an icon alone; its label is its tooltip too. */
export function iconButton(name, label, onClick) {
  const button = make("button", { type: "button", class: "icon", title: label, "aria-label": label }, icon(name));
  button.addEventListener("click", () => onClick(button));
  return button;
}

/** Returns a button that copies a text and then shows for a moment that it has. */
export function copyButton(label, text) {
  return iconButton("copy", label, async (button) => {
    await copy(text());
    button.replaceChildren(icon("check"));
    button.title = "Copied";
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.title = label;
    }, 1500);
  });
}

async function copy(text) {
  // Browsers give a page without https, and of another machine, no clipboard.
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = make("textarea", { value: text, class: "unseen", readOnly: true });
  const focused = document.activeElement;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
  focused?.focus();
}
