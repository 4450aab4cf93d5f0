// Beside the tree: the tokens of one node, who holds what, why blocks left.

import { headers } from "./feed.js";
import { serverNow } from "./figures.js";
import { count, duration, whole } from "./numbers.js";
import * as pool from "./pool.js";
import * as tree from "./tree.js";

const byId = (id) => document.getElementById(id);

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// -- tokens ---------------------------------------------------------------------------------------

let known = { id: null, tokens: 0, answer: null };

/** A node's tokens from the server; null if it is gone. The last answer is kept. */
async function tokensOf(item) {
  if (known.id === item.id && known.tokens === item.tokens) return known.answer;
  const response = await fetch(`/page/nodes/${item.serial}`, { headers: headers(), cache: "no-store" });
  const answer = response.ok ? await response.json() : null;
  known = { id: item.id, tokens: item.tokens, answer };
  return answer;
}

function fillFacts(list, item) {
  list.replaceChildren(...tree.factsOf(item).map(([name, value]) =>
    element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value }))));
}

function fillTokens(place, answer, blockSize, most) {
  let at = 0;
  const spans = answer.pieces.slice(0, most).map(([text, number]) => {
    const span = element("span", { textContent: text, title: answer.ids.slice(at, at + number).join(" ") });
    at += number;
    if (at % blockSize === 0) span.className = "edge";
    return span;
  });
  if (at < answer.num_tokens) spans.push(element("span", { textContent: ` … ${count(answer.num_tokens - at, "more token", "more tokens")}` }));
  place.replaceChildren(...spans);
}

let blockSize = 16;
let selected = null;
export function begin(hello) { blockSize = hello.block_size; }

async function showDetail(item) {
  selected = item;
  byId("detail-note").textContent = item.kind === "holder" ? item.name : "";
  fillFacts(byId("detail-facts"), item);
  byId("detail-tokens").replaceChildren();
  if (item.kind === "holder") {
    byId("detail-tokens").textContent = item.text;
    tree.showPath(item.id);
    pool.mark([]);
    return;
  }
  tree.showPath(null);
  if (item.kind !== "node") return;
  const answer = await tokensOf(item);
  if (selected !== item) return;
  if (answer) fillTokens(byId("detail-tokens"), answer, blockSize, 1024);
  else byId("detail-note").textContent = "this node has left the tree";
  pool.mark(answer?.blocks ?? []);
}
tree.onSelect((item) => { showDetail(item); });

// -- on hover -------------------------------------------------------------------------------------

const tip = byId("tip");
let pointed = null;
let timer = 0;

function place(event) {
  const [wide, high] = [tip.offsetWidth, tip.offsetHeight];
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - wide - 8)}px`;
  tip.style.top = `${event.clientY + 18 + high > innerHeight ? event.clientY - high - 12 : event.clientY + 18}px`;
}

function hide() {
  clearTimeout(timer);
  pointed = null;
  tip.hidden = true;
}

tree.onPoint((item, event) => {
  if (!item) return hide();
  if (pointed === item.id) return place(event);
  hide();
  pointed = item.id;
  timer = setTimeout(async () => {
    const facts = element("dl", { className: "facts" });
    fillFacts(facts, item);
    const text = element("div", { className: "tokens" });
    if (item.kind === "holder") text.textContent = item.text;
    tip.replaceChildren(facts, text);
    tip.hidden = !facts.childElementCount;
    place(event);
    if (item.kind !== "node") return;
    const answer = await tokensOf(item);
    if (pointed !== item.id || !answer) return;
    fillTokens(text, answer, blockSize, 160);
    place(event);
  }, 90);
});

const canvas = byId("pool");
canvas.addEventListener("pointermove", (event) => {
  const text = pool.describe(event);
  tip.hidden = !text;
  tip.textContent = text ?? "";
  if (text) place(event);
});
canvas.addEventListener("pointerleave", hide);

// -- who holds what -------------------------------------------------------------------------------

export function showRequests(part) {
  byId("requests-note").textContent =
    `${count(part.num_running, "request")} running, ${whole(part.num_waiting)} waiting`;
  const rows = part.holders.map((its) => {
    const row = element("tr", {}, ...[its.name, whole(its.tokens), whole(its.blocks), whole(its.own), its.text]
      .map((value) => element("td", { textContent: value })));
    row.firstChild.title = its.name;
    row.dataset.holder = `h${its.key}`;
    return row;
  });
  for (const its of part.waiting) {
    const why = its.preemptions ? "waits again: it was preempted" : "waits";
    rows.push(element("tr", {}, ...[its.name, whole(its.tokens), "–", "–", `${why}, ${duration(Math.max(serverNow() - its.since, 0))}`]
      .map((value) => element("td", { textContent: value }))));
  }
  const hidden = part.num_holders - part.holders.length + part.num_waiting - part.waiting.length;
  if (hidden > 0) rows.push(note(`and ${whole(hidden)} more`));
  if (!rows.length) rows.push(note("nobody holds a block now"));
  byId("requests").replaceChildren(...rows);
}

function note(text) {
  const row = element("tr", { className: "none" }, element("td", { textContent: text, colSpan: 5 }));
  return row;
}

byId("requests").addEventListener("pointerover", (event) => tree.showPath(event.target.closest("tr")?.dataset.holder ?? null));
byId("requests").addEventListener("pointerleave", () => tree.showPath(null));

// -- why blocks left ------------------------------------------------------------------------------

let removals = [];

const BECAUSE = {
  evicted: (its) => `${its.ephemeral ? "ephemeral, " : ""}unused for ${duration(its.unused)}`,
  superseded: () => "a longer one begins alike",
  withdrawn: (its) => (its.tokens < blockSize ? "its holder writes on in it" : "its KV is not to be trusted"),
  reset: () => "the cache was reset",
};

export function showRemovals(part) {
  removals = part.removals;
  drawRemovals();
}

/** Once a second, too: times go on. */
export function drawRemovals() {
  const now = serverNow();
  byId("removed-empty").hidden = removals.length > 0;
  byId("removed").replaceChildren(...removals.slice(0, 60).map((its) => element("li", { title: its.text },
    element("span", { className: `badge ${its.reason}`, textContent: its.reason }),
    element("b", { textContent: count(its.blocks, "block") }),
    element("span", { textContent: BECAUSE[its.reason](its) }),
    element("span", { className: "when", textContent: `${duration(Math.max(now - its.at, 0))} ago` }),
    element("span", { className: "text", textContent: its.text }))));
}

export function showRemoved(totals) {
  byId("removed-note").textContent = Object.entries(totals)
    .map(([reason, blocks]) => `${whole(blocks)} ${reason}`).join(" · ") || "none so far";
}
