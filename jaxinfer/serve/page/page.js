// The page: one pane, or two side by side, one field to write in, and the conversation that is kept in this browser.

import { getJson, postJson } from "./api.js";
import { eachAnswer, newConversation } from "./conversation.js";
import { $ } from "./dom.js";
import { History } from "./history.js";
import { watch } from "./live.js";
import { switchOff } from "./markdown.js";
import { Pane } from "./pane.js";
import * as store from "./store.js";
import { showLegend } from "./tokens.js";

const SAVE_INTERVAL = 3000; // milliseconds, while an answer comes
const TITLE_CHARACTERS = 60;
const NARROW = matchMedia("(max-width: 56rem)"); // as in page.css

let conversation = newConversation();
let running = null; // the AbortController of what runs
let ended = Promise.resolve(); // when all that ran has ended
let saving = null; // the timer of the next save

const page = {
  defaults: { max_tokens: null },
  contextSize: null,
  get model() {
    return $("model").value;
  },
  get view() {
    return $("view").value;
  },
  get isChat() {
    return $("mode").value === "chat";
  },
  get isRunning() {
    return running !== null;
  },
  run,
  changed: () => (saving ??= setTimeout(saveNow, running ? SAVE_INTERVAL : 0)),
  settingsChanged: saveSettings,
};
const panes = [new Pane("A", page), new Pane("B", page)];
const shownPanes = () => ($("compare").checked ? panes : panes.slice(0, 1));
const history_ = new History({
  get id() {
    return conversation.id;
  },
  open,
  renamed: (title) => (conversation.title = title),
  notify,
});

function notify(text) {
  $("notice-text").textContent = text;
  $("notice").hidden = !text;
}

/** Runs requests of some panes, which return if they succeed, until they end or are stopped. */
async function run(work) {
  if (running) return;
  notify("");
  try {
    for (const pane of shownPanes()) pane.settings.check();
  } catch (error) {
    notify(error.message);
    return;
  }
  running = new AbortController();
  showState("Answering…");
  ended = finish([work(running.signal)].flat());
  saveNow();
  await ended;
}

async function finish(answers) {
  const results = await Promise.allSettled(answers);
  const failed = results.find((result) => result.status === "rejected");
  if (failed) notify(failed.reason.message);
  const isDone = results.every((result) => result.value);
  const state = running.signal.aborted ? "Stopped." : isDone ? "Done." : "Failed.";
  running = null;
  showState(state);
  await saveNow();
}

function showState(state) {
  document.body.classList.toggle("running", page.isRunning);
  document.body.classList.toggle("empty", shownPanes().every((pane) => pane.isEmpty));
  $("send").hidden = page.isRunning;
  $("stop").hidden = !page.isRunning;
  $("state").textContent = state;
}

function send() {
  const text = $("prompt").value;
  if (!text.trim() || running) return;
  run((signal) => {
    $("prompt").value = "";
    fitPrompt();
    if (!conversation.title) conversation.title = text.trim().replace(/\s+/g, " ").slice(0, TITLE_CHARACTERS);
    conversation.mode = $("mode").value;
    document.body.classList.remove("empty");
    return shownPanes().map((pane) => pane.send(text, signal));
  });
}

/** Opens a conversation, and stops what runs in the one before. */
async function open(opened) {
  if (!opened) return;
  running?.abort();
  await ended;
  notify("");
  conversation = opened;
  eachAnswer(conversation, (answer) => (answer.end ??= "stopped")); // the page was left while it came
  if (opened.title) $("mode").value = opened.mode;
  panes.forEach((pane, index) => pane.open(opened.roots[index]));
  history.replaceState(null, "", opened.title ? `#${opened.id}` : location.pathname);
  document.title = opened.title ? `${opened.title} · jaxinfer` : "jaxinfer";
  if (opened.roots[1].items.length) $("compare").checked = true;
  showPanes();
  if (NARROW.matches) showDrawer("history", false);
  showHistory();
  $("prompt").focus();
}

async function saveNow() {
  clearTimeout(saving);
  saving = null;
  if (!conversation.title) return;
  try {
    await store.save(conversation);
  } catch (error) {
    notify(`The conversation is not kept in this browser: ${error.message}`);
    return;
  }
  history.replaceState(null, "", `#${conversation.id}`);
  document.title = `${conversation.title} · jaxinfer`;
  await showHistory();
}

const showHistory = () => history_.show().catch((error) => notify(`No conversations are kept: ${error.message}`));

function saveSettings() {
  const [model, view, compare] = [page.model, page.view, $("compare").checked];
  store.saveSettings({ model, view, compare, panes: panes.map((pane) => pane.settings.values) });
}

function loadSettings() {
  const settings = store.loadSettings();
  if (settings.view) $("view").value = settings.view;
  $("compare").checked = settings.compare === true;
  panes.forEach((pane, index) => (pane.settings.values = settings.panes?.[index]));
}

function showPanes() {
  $("panes").replaceChildren(...shownPanes().map((pane) => pane.element));
  document.body.classList.toggle("comparing", $("compare").checked);
  panes[1].settings.element.hidden = !$("compare").checked;
  showState($("state").textContent);
}

function showView() {
  document.body.dataset.view = page.view;
  for (const pane of panes) if (pane.root) pane.showAnswers();
}

function showDrawer(name, isOpen) {
  $(name).hidden = !isOpen;
  $(`show-${name}`).setAttribute("aria-expanded", isOpen);
  if (isOpen && NARROW.matches) {
    const other = name === "history" ? "settings" : "history";
    showDrawer(other, false);
    $(name).querySelector("button, select, input").focus();
  }
}

/** Closes the drawers that lie over a narrow page; returns true if there was one. */
function closeDrawers() {
  const open = ["history", "settings"].filter((name) => NARROW.matches && !$(name).hidden);
  for (const name of open) {
    showDrawer(name, false);
    $(`show-${name}`).focus();
  }
  return open.length > 0;
}

/** Lets the field grow with its text, to a third of the window. */
function fitPrompt() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${Math.min($("prompt").scrollHeight + 2, innerHeight / 3)}px`;
}

function listen() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("prompt").addEventListener("input", fitPrompt);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "ArrowUp" && !$("prompt").value) panes[0].editLast();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !closeDrawers()) running?.abort();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("new").addEventListener("click", () => open(newConversation()));
  $("dismiss").addEventListener("click", () => notify(""));
  $("shade").addEventListener("click", closeDrawers);
  for (const name of ["history", "settings"]) {
    $(`show-${name}`).addEventListener("click", () => showDrawer(name, $(name).hidden));
    $(`close-${name}`).addEventListener("click", () => {
      showDrawer(name, false);
      $(`show-${name}`).focus();
    });
  }
  $("model").addEventListener("change", saveSettings);
  for (const [id, show] of [["compare", showPanes], ["view", showView]]) {
    $(id).addEventListener("change", () => (show(), saveSettings()));
  }
  addEventListener("hashchange", openAddressed);
}

/** Opens the conversation that the address names, or a new one. */
async function openAddressed() {
  const id = location.hash.slice(1);
  if (id && id === conversation.id) return;
  const found = id ? await store.load(id).catch(() => null) : null;
  await open(found ?? newConversation());
}

async function readModel() {
  const { data } = await getJson("/v1/models");
  const { model: chosen } = store.loadSettings();
  $("model").replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === chosen)));
  const model = await getJson("/page/model");
  [page.defaults, page.contextSize] = [model.defaults, model.max_model_len];
  if (!model.renders_markdown) switchOff();
  for (const pane of panes) pane.settings.showDefaults(model.defaults);
}

async function begin() {
  for (const pane of panes) $("forms").append(pane.settings.element);
  loadSettings();
  showLegend($("legend"));
  showDrawer("history", !NARROW.matches);
  listen();
  watch($("live"));
  showPanes();
  try {
    await readModel();
  } catch (error) {
    notify(error.message);
    return;
  }
  showView();
  const refusal = await chatRefusal();
  await openAddressed(); // and last, the focus, which from then on is the reader's
  if (refusal) {
    $("mode").value = "text";
    notify(`No chat with this model, so the mode is plain text, which the model continues: ${refusal}`);
  }
}

/** Returns why the model takes no conversations; null if it does. */
async function chatRefusal() {
  try {
    await postJson("/tokenize", { messages: [{ role: "user", content: "a" }] });
    return null;
  } catch (error) {
    return error.message;
  }
}

begin();
