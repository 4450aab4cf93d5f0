// The pool as a heat map: a cell a block (or a few), colour for the state, strength for references.

import { count, percent, whole } from "./numbers.js";

const STATES = ["free", "held by sequences alone", "cached alone", "held and cached"];
const canvas = document.getElementById("pool");
const MOST_HEIGHT = 160;

let pool = null;
let marked = new Set();
let size = 0;
let columns = 0;

/** Colours as the theme resolves them, from the legend's keys. */
function colours() {
  const of = (name) => getComputedStyle(document.querySelector(`.key.${name}`));
  return {
    free: of("free").backgroundColor, held: of("held").backgroundColor, cached: of("cached").backgroundColor,
    both: ["both2", "both3", "both4"].map((name) => of(name).backgroundColor),
    heldLine: of("held").borderTopColor, ink: getComputedStyle(canvas).color,
    more: of("both3").borderTopColor,
  };
}

export function update(part) {
  pool = part;
  const [free, held, cached, both] = pool.counts;
  const total = free + held + cached + both;
  for (const [name, value] of Object.entries({ free, held, cached, both })) {
    document.getElementById(`count-${name}`).textContent = whole(value);
  }
  document.getElementById("pool-note").textContent =
    `${percent((held + both) / total)} of ${count(total, "block")} held` +
    (pool.group > 1 ? `, ${pool.group} to a cell` : "");
  canvas.setAttribute("aria-label", `Pool of ${total} blocks: ${free} free, ${held} held by sequences alone, ` +
    `${cached} cached alone, ${both} held and cached`);
  draw();
}

/** Outline the cells of these blocks: those of the node that is looked at. */
export function mark(blocks) {
  marked = new Set(blocks);
  draw();
}

export function draw() {
  const width = canvas.clientWidth;
  if (!pool || !width) return;
  const cells = pool.states.length;
  // As large as fits into the height, between 4 and 20 pixels.
  size = 20;
  while (size > 4 && Math.ceil(cells / Math.floor(width / size)) * size > MOST_HEIGHT) size -= 1;
  columns = Math.max(Math.floor(width / size), 1);
  const rows = Math.ceil(cells / columns);
  const scale = window.devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * scale), Math.round(rows * size * scale)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.height = `${rows * size}px`;
  }
  const pen = canvas.getContext("2d");
  const colour = colours();
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, rows * size);
  const gap = size > 6 ? 2 : 1;
  const shown = new Set([...marked].map((block) => Math.floor(block / pool.group)));
  for (let cell = 0; cell < cells; cell += 1) {
    const state = pool.states[cell];
    const refs = Number(pool.refs[cell]);
    if (state === "0") pen.fillStyle = colour.free;
    else if (state === "1") pen.fillStyle = refs > 1 ? colour.heldLine : colour.held;
    else if (state === "2") pen.fillStyle = colour.cached;
    else if (refs >= 9) pen.fillStyle = colour.more;
    else pen.fillStyle = colour.both[refs < 3 ? 0 : refs < 5 ? 1 : 2];
    const [x, y] = [(cell % columns) * size, Math.floor(cell / columns) * size];
    pen.fillRect(x, y, size - gap, size - gap);
    if (shown.has(cell)) {
      pen.strokeStyle = colour.ink;
      pen.lineWidth = 1.5;
      pen.strokeRect(x + 0.5, y + 0.5, size - gap - 1, size - gap - 1);
    }
  }
}

/** What the cell under the pointer says. */
export function describe(event) {
  const cell = Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size);
  if (!pool || !(cell < pool.states.length) || event.offsetX >= columns * size) return null;
  const first = cell * pool.group;
  const name = pool.group > 1 ? `blocks ${first}–${first + pool.group - 1}, mostly` : `block ${first}:`;
  const refs = pool.refs[cell] === "9" ? "9 or more" : pool.refs[cell];
  const most = pool.group > 1 ? "at most " : "";
  return `${name} ${STATES[pool.states[cell]]}` + (refs === "0" ? "" : `, ${most}${refs === "1" ? "1 reference" : `${refs} references`}`);
}
