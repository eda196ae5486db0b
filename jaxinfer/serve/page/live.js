// The live view: the server's metrics, read every two seconds while the view is open.

import { getText } from "./api.js";

const SECONDS = 2;
const WINDOW = 60; // seconds of which percentiles and rates tell
const samples = []; // of the window, the oldest first: { time, values }

/** Returns the numbers of a text in Prometheus's format, by name and labels; the model's name is left out. */
export function parse(text) {
  const values = new Map();
  for (const line of text.split("\n")) {
    const found = /^([\w:]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!found) continue;
    const labels = (found[2] ?? "").replace(/,?model_name="(?:[^"\\]|\\.)*"/, "").replace(/^,/, "");
    values.set(labels ? `${found[1]}{${labels}}` : found[1], Number(found[3]));
  }
  return values;
}

/** Returns a quantile of what a histogram has counted between two samples, linear inside a bucket; or null. */
export function quantile(name, share, newest, oldest) {
  const buckets = [];
  for (const [key, value] of newest) {
    const found = key.startsWith(`${name}_bucket{`) && /le="([^"]+)"/.exec(key);
    if (found) buckets.push([found[1] === "+Inf" ? Infinity : Number(found[1]), value - (oldest?.get(key) ?? 0)]);
  }
  buckets.sort((a, b) => a[0] - b[0]);
  const total = buckets.at(-1)?.[1] ?? 0;
  if (!total) return null;
  let [low, below] = [0, 0];
  for (const [high, count] of buckets) {
    if (count >= share * total) {
      return high === Infinity ? low : low + ((high - low) * (share * total - below)) / (count - below);
    }
    [low, below] = [high, count];
  }
}

const milliseconds = (seconds) => (seconds === null ? "–" : `${Math.round(seconds * 1000)} ms`);
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

async function refresh() {
  const state = document.getElementById("live-state");
  try {
    samples.push({ time: performance.now() / 1000, values: parse(await getText("/metrics")) });
    state.textContent = "Rates and percentiles are of the last minute.";
  } catch (error) {
    state.textContent = `No numbers: ${error.message}`;
    return;
  }
  const newest = samples.at(-1);
  while (newest.time - samples[0].time > WINDOW) samples.shift();
  show(newest, samples[0]);
}

function show(newest, oldest) {
  const now = (name) => newest.values.get(name) ?? 0;
  const gained = (name) => now(name) - (oldest.values.get(name) ?? 0);
  const seconds = newest.time - oldest.time;
  const spread = (name) =>
    [0.5, 0.99].map((share) => milliseconds(quantile(name, share, newest.values, oldest.values))).join(" / ");
  const pages = Object.fromEntries(["owned", "cached", "free"].map((s) => [s, now(`jaxinfer:pages{state="${s}"}`)]));
  const numbers = {
    "Rows running": now("vllm:num_requests_running"),
    "Queue": now("vllm:num_requests_waiting"),
    "Tokens/s": seconds ? (gained("vllm:generation_tokens_total") / seconds).toFixed(1) : "–",
    "TTFT p50 / p99": spread("vllm:time_to_first_token_seconds"),
    "ITL p50 / p99": spread("vllm:inter_token_latency_seconds"),
    "Prefix hits": percent(gained("vllm:prefix_cache_hits_total"), gained("vllm:prefix_cache_queries_total")),
    "Accepted drafts": percent(
      gained("vllm:spec_decode_num_accepted_tokens_total"), gained("vllm:spec_decode_num_draft_tokens_total")),
    "Pages owned": pages.owned,
    "Pages cached": pages.cached,
    "Pages free": pages.free,
  };
  document.getElementById("numbers").replaceChildren(
    ...Object.entries(numbers).map(([name, value]) => {
      const item = document.createElement("div");
      const [term, number] = [document.createElement("dt"), document.createElement("dd")];
      [term.textContent, number.textContent] = [name, value];
      item.append(term, number);
      return item;
    }));
  const bar = document.getElementById("pages");
  bar.setAttribute("aria-label", `pages: ${pages.owned} owned, ${pages.cached} cached, ${pages.free} free`);
  bar.replaceChildren(
    ...Object.entries(pages).map(([name, value]) => {
      const part = document.createElement("div");
      part.className = name;
      part.style.flexGrow = value;
      return part;
    }));
}

export function watch(details) {
  let timer = null;
  const tick = async () => {
    if (!document.hidden && details.checkVisibility()) await refresh();
    if (details.open) timer = setTimeout(tick, SECONDS * 1000);
  };
  details.addEventListener("toggle", () => {
    clearTimeout(timer);
    if (details.open) tick();
  });
}
