// The tree: drawn from the feed, folded, searched, zoomed, and walked through with the keyboard.
/* global d3 */

import { BAR, layOut, linkTo, readHolders, readNodes } from "./layout.js";
import { serverNow } from "./figures.js";
import { count, duration, whole } from "./numbers.js";

const svg = d3.select("#tree");
const scroller = document.getElementById("tree-scroll");
const links = svg.append("g").attr("aria-hidden", "true");
const group = svg.append("g").attr("role", "presentation");

const view = { all: false, open: new Set(), shut: new Set(), match: null };
let spaces = [];
let nodes = [];
let holders = [];
let blockSize = 16;
let drawing = { items: [], width: 0, height: 0, matches: 0 };
let byId = new Map();
let current = null; // The item that has the one tab stop.
let selected = null;
let zoom = 1;
const READABLE = 0.65; // The smallest zoom at which texts are read with ease.
let pathOf = null;
let letter = 6.7; // Width of one.
const watchers = { select: () => {}, point: () => {} };

export const onSelect = (function_) => { watchers.select = function_; };
export const onPoint = (function_) => { watchers.point = function_; };
export const itemOf = (id) => byId.get(id);

// -- from the feed --------------------------------------------------------------------------------

export function begin(hello) {
  blockSize = hello.block_size;
  const probe = svg.append("text").text("M".repeat(40));
  letter = probe.node().getComputedTextLength() / 40 || letter;
  probe.remove();
}

let drawn = false;
/** A new tree, new holders, or both: drawn once, in the next frame. */
export function update(tree, holding) {
  if (tree) {
    spaces = tree.spaces;
    nodes = readNodes(tree);
  }
  if (holding) holders = readHolders(holding.holders);
  if (!drawn) requestAnimationFrame(draw);
  drawn = true;
}

// -- drawing --------------------------------------------------------------------------------------

const AGES = [[600, "age3"], [60, "age2"], [15, "age1"]];

function classesOf(item, now) {
  const names = ["item", item.kind];
  if (item.kind === "node") {
    if (item.holders) names.push("both", item.holders > 3 ? "both4" : item.holders > 1 ? "both3" : "both2");
    else names.push(AGES.find(([age]) => now - item.used > age)?.[1] ?? "age0");
    if (item.hint === 1) names.push("ephemeral");
    if (item.hint === 2) names.push("pinned");
  }
  if (item.matches) names.push("match");
  if (pathOf?.has(item.id)) names.push("path");
  return names.join(" ");
}

function fit(text, width) {
  const most = Math.max(Math.floor(width / letter), 0);
  return text.length <= most ? text : `${text.slice(0, Math.max(most - 1, 0))}…`;
}

function textOf(item) {
  if (item.kind === "node") return fit(item.text, item.width - 16 - (item.holders > 1 ? 26 : 0));
  if (item.kind !== "holder") return item.text;
  const name = item.kind === "holder" && item.name.length > 18 ? `…${item.name.slice(-17)}` : item.name;
  const rest = item.width - 20 - letter * (name.length + 1);
  const end = item.text.slice(-Math.max(Math.floor(rest / letter), 0));
  return end && rest > letter ? `${name} ${end}` : name;
}

/** What a screen reader says of an item. */
function nameOf(item) {
  if (item.kind === "node") {
    const held = item.holders ? `held by ${count(item.holders, "sequence")}` : "held by nobody";
    const hint = item.hint === 1 ? ", ephemeral" : item.hint === 2 ? ", kept by priority" : "";
    return `${item.text}; ${count(item.tokens, "token")} in ${count(item.blocks, "block")}, ${held}${hint}`;
  }
  // What is seen is a part of what is said, word by word.
  if (item.kind === "holder") return `${textOf(item)}; sequence ${item.name}, ${count(item.tokens, "token")}, ${item.own} blocks of its own`;
  if (item.kind === "root") return `namespace ${item.text}`;
  return item.only ? `${item.text}, too many to be sent` : `${item.text}, Enter shows them`;
}

const isHeld = (item) => item.kind === "holder" || item.holders > 0;

function draw() {
  drawn = false;
  drawing = layOut(spaces, nodes, holders, view);
  const before = byId;
  byId = new Map(drawing.items.map((item) => [item.id, item]));
  const hadFocus = group.node().contains(document.activeElement);
  if (!byId.has(current)) current = nearest(current, before) ?? drawing.items[0]?.id ?? null;
  if (selected && !byId.has(selected)) selected = null;
  const now = serverNow();

  if (!before.size && drawing.width > scroller.clientWidth) zoom = Math.max(scroller.clientWidth / drawing.width, READABLE);
  scale();
  document.getElementById("tree-empty").hidden = drawing.items.length > 0;
  // Held ones last, so that they lie above the others' trunks.
  const linked = drawing.items.filter((item) => item.parent).sort((a, b) => (isHeld(a) ? 1 : 0) - (isHeld(b) ? 1 : 0));
  links.selectAll("path").data(linked, (item) => item.id)
    .join("path").order()
    .attr("class", (item) => (isHeld(item) ? "link held" : "link"))
    .attr("d", linkTo);

  const items = group.selectAll("g.item:not(.leaving)").data(drawing.items, (item) => item.id)
    .join(enter, (old) => old, leave)
    .attr("class", (item) => classesOf(item, now))
    .attr("transform", (item) => `translate(${item.x},${item.y})`)
    .attr("tabindex", (item) => (item.id === current ? 0 : -1))
    .attr("aria-level", (item) => item.depth)
    .attr("aria-posinset", (item) => item.place)
    .attr("aria-setsize", (item) => item.siblings)
    .attr("aria-selected", (item) => String(item.id === selected))
    .attr("aria-expanded", (item) => (item.folds ? String(Boolean(item.unfolded)) : null))
    .attr("aria-label", nameOf)
    .order();
  items.select(".bar").attr("width", (item) => item.width);
  items.select(".ring").attr("width", (item) => item.width + 6);
  items.select(".label").text(textOf);
  items.select(".count").attr("x", (item) => item.width - 7)
    .text((item) => (item.kind === "node" && item.holders > 1 ? `×${item.holders}` : ""));
  items.select(".ticks").attr("d", ticks);
  items.select(".unfold").attr("transform", (item) => `translate(${item.width + 11},0)`)
    .attr("display", (item) => (item.folds && !item.unfolded ? null : "none"));
  if (hadFocus && current && document.activeElement !== elementOf(current)) elementOf(current)?.focus({ preventScroll: true });
}

function enter(entering) {
  const item = entering.append("g").attr("role", "treeitem").attr("data-id", (its) => its.id);
  const left = -BAR / 2;
  item.append("rect").attr("class", "ring").attr("x", -3).attr("y", left - 3).attr("height", BAR + 6).attr("rx", 7);
  item.append("rect").attr("class", "bar").attr("y", left).attr("height", BAR).attr("rx", (its) => (its.kind === "node" ? 4 : 9));
  item.append("path").attr("class", "ticks");
  item.append("text").attr("class", "label").attr("x", 8).attr("dy", "0.34em");
  item.append("text").attr("class", "count").attr("dy", "0.34em");
  const unfold = item.append("g").attr("class", "unfold");
  unfold.append("circle").attr("class", "fold").attr("r", 6.5);
  unfold.append("text").attr("class", "fold-sign").attr("dy", "0.34em").text("+");
  return item;
}

function leave(leaving) {
  const quiet = matchMedia("(prefers-reduced-motion: reduce)").matches || leaving.size() > 200;
  if (quiet) leaving.remove();
  else {
    leaving.classed("leaving", true).attr("role", "presentation").attr("tabindex", null).attr("aria-hidden", "true");
    setTimeout(() => leaving.remove(), 350);
  }
}

/** Where one block ends and the next begins. */
function ticks(item) {
  if (item.kind !== "node" || item.blocks < 2 || item.blocks > 48) return "";
  const cell = item.width / (item.tokens / blockSize);
  let path = "";
  for (let block = 1; block < item.tokens / blockSize; block += 1) path += `M${(block * cell).toFixed(1)},${-BAR / 2 + 1}v${BAR - 2}`;
  return path;
}

function nearest(id, before) {
  for (let item = before.get(id); item; item = item.parent) if (byId.has(item.id)) return item.id;
  return null;
}

const elementOf = (id) => group.node().querySelector(`[data-id="${id}"]`);

// -- zooming and panning --------------------------------------------------------------------------

function scale() {
  svg.attr("viewBox", `0 0 ${Math.max(drawing.width, 1)} ${Math.max(drawing.height, 1)}`)
    .attr("width", drawing.width * zoom).attr("height", drawing.height * zoom)
    .classed("far", zoom < 0.45);
}

export function setZoom(next, at = { x: scroller.clientWidth / 2, y: scroller.clientHeight / 2 }) {
  next = Math.min(Math.max(next, 0.08), 3);
  const [x, y] = [(scroller.scrollLeft + at.x) / zoom, (scroller.scrollTop + at.y) / zoom];
  zoom = next;
  scale();
  scroller.scrollLeft = x * zoom - at.x;
  scroller.scrollTop = y * zoom - at.y;
}

export const zoomBy = (factor, at) => setZoom(zoom * factor, at);

/** As large as shows the tree's whole width, or its natural size if that is larger than needed. */
export function zoomToFit() {
  setZoom(Math.min(1, (scroller.clientWidth - 4) / Math.max(drawing.width, 1)));
  scroller.scrollTo(0, 0);
}

scroller.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  const box = scroller.getBoundingClientRect();
  zoomBy(Math.exp(-event.deltaY / 300), { x: event.clientX - box.left, y: event.clientY - box.top });
}, { passive: false });

let grip = null;
scroller.addEventListener("pointerdown", (event) => {
  if (event.button || event.target.closest(".item")) return;
  grip = { x: event.clientX + scroller.scrollLeft, y: event.clientY + scroller.scrollTop };
  scroller.classList.add("dragging");
});
addEventListener("pointermove", (event) => {
  if (grip) scroller.scrollTo(grip.x - event.clientX, grip.y - event.clientY);
});
addEventListener("pointerup", () => {
  grip = null;
  scroller.classList.remove("dragging");
});

// -- folding and searching ------------------------------------------------------------------------

export function showAll(all) {
  view.all = all;
  view.open.clear();
  view.shut.clear();
  draw();
}

/** Mark what contains a text and unfold the way there; the number of finds, null without a text. */
export function search(text) {
  const sought = text.trim().toLowerCase();
  view.match = sought
    ? (item) => item.text.toLowerCase().includes(sought) || item.name?.toLowerCase().includes(sought)
    : null;
  draw();
  const first = drawing.items.find((item) => item.matches);
  if (first) reveal(first);
  return sought ? drawing.matches : null;
}

/** To the first find from the search, then to the next or the one before; large enough to be read. */
export function focusMatch(step = 0) {
  const found = drawing.items.filter((item) => item.matches);
  if (!found.length) return;
  const at = found.findIndex((item) => item.id === current);
  if (zoom < READABLE) setZoom(READABLE);
  focus(found[step && at >= 0 ? (at + step + found.length) % found.length : 0].id);
}

function fold(item) {
  view.open.delete(item.id);
  view.shut.add(item.id);
  draw();
}

function unfold(item) {
  view.shut.delete(item.id);
  view.open.add(item.id);
  draw();
}

/** Outline the way to a sequence, or nothing. */
export function showPath(id) {
  pathOf = null;
  if (id && byId.has(id)) {
    pathOf = new Set();
    for (let item = byId.get(id); item; item = item.parent) pathOf.add(item.id);
  }
  const now = serverNow();
  group.selectAll("g.item:not(.leaving)").attr("class", (item) => classesOf(item, now));
}

// -- keyboard and pointer -------------------------------------------------------------------------

function reveal(item) {
  const [x, y] = [item.x * zoom, item.y * zoom];
  const edge = 40;
  if (y < scroller.scrollTop + edge) scroller.scrollTop = y - edge;
  if (y > scroller.scrollTop + scroller.clientHeight - edge) scroller.scrollTop = y - scroller.clientHeight + edge;
  if (x < scroller.scrollLeft + edge) scroller.scrollLeft = x - edge;
  const end = Math.min(item.width * zoom, scroller.clientWidth - 2 * edge);
  if (x + end > scroller.scrollLeft + scroller.clientWidth) scroller.scrollLeft = x + end - scroller.clientWidth + edge;
}

function focus(id) {
  if (!byId.has(id)) return;
  elementOf(current)?.setAttribute("tabindex", "-1");
  current = id;
  const element = elementOf(id);
  element.setAttribute("tabindex", "0");
  element.focus({ preventScroll: true });
  reveal(byId.get(id));
}

function select(item) {
  if (item.kind === "more") {
    if (!item.only) unfold(item.of);
    const at = drawing.items.findIndex((its) => its.parent?.id === item.of.id);
    if (at >= 0) focus(drawing.items[at].id);
    return;
  }
  selected = item.id;
  group.selectAll("g.item").attr("aria-selected", (its) => String(its.id === selected));
  watchers.select(item);
}

function onKey(event) {
  const item = byId.get(current);
  if (!item || event.ctrlKey || event.metaKey || event.altKey) return;
  const at = drawing.items.indexOf(item);
  const child = drawing.items.find((its) => its.parent === item);
  const go = {
    ArrowDown: () => focus(drawing.items[at + 1]?.id),
    ArrowUp: () => focus(drawing.items[at - 1]?.id),
    Home: () => focus(drawing.items[0].id),
    End: () => focus(drawing.items.at(-1).id),
    ArrowRight: () => { if (item.folds && !item.unfolded) unfold(item); else if (child) focus(child.id); },
    ArrowLeft: () => { if (item.folds && item.unfolded && item.kind !== "root") fold(item); else if (item.parent) focus(item.parent.id); },
    Enter: () => select(item),
    " ": () => select(item),
    n: () => focusMatch(1),
    N: () => focusMatch(-1),
    "+": () => zoomBy(1.25),
    "-": () => zoomBy(0.8),
    "0": zoomToFit,
  }[event.key];
  if (!go) return;
  event.preventDefault();
  go();
}
svg.on("keydown", onKey);

const itemAt = (event) => byId.get(event.target.closest?.(".item")?.dataset.id);

svg.on("click", (event) => {
  const item = itemAt(event);
  if (!item) return;
  focus(item.id);
  if (event.target.closest(".unfold")) unfold(item);
  else select(item);
});
svg.on("dblclick", (event) => {
  const item = itemAt(event);
  if (item?.folds) (item.unfolded ? fold : unfold)(item);
});
svg.on("pointermove", (event) => watchers.point(itemAt(event) ?? null, event));
svg.on("pointerleave", (event) => watchers.point(null, event));

/** What there is to say of an item, as [name, value] pairs. */
export function factsOf(item) {
  if (item.kind === "node") {
    const facts = [["tokens", whole(item.tokens)], ["blocks", whole(item.blocks)], ["from token", whole(item.start * blockSize)],
      ["held by", item.holders ? count(item.holders, "sequence") : "nobody"],
      ["used", `${duration(Math.max(serverNow() - item.used, 0))} ago`], ["hits", whole(item.hits)]];
    if (item.hint) facts.push(["stays", item.hint === 1 ? "ephemeral: goes first" : "by priority"]);
    return facts;
  }
  if (item.kind === "holder") {
    return [["tokens", whole(item.tokens)], ["computed", whole(item.computed)], ["blocks", whole(item.blocks)],
      ["of its own", whole(item.own)], ["generated", whole(item.generated)]];
  }
  return item.kind === "root" ? [["namespace", item.text]] : [];
}
