// The tiles: rates of the last minute from counters that only grow, and percentiles.

import { count, duration, percent, short } from "./numbers.js";

const SECONDS = 60;
const SECOND = 0, SAMPLED = 1, QUERIED = 3, HIT = 4, READ = 5, UNSHARED = 6;

const byId = (id) => document.getElementById(id);

let marks = [];
let ahead = 0; // The server's clock less ours, in seconds.

const ours = () => performance.now() / 1000;
/** The server's clock now, in seconds. */
export const serverNow = () => ours() + ahead;

export function begin(hello) {
  ahead = hello.now - ours();
  marks = hello.history;
}

/** New counters and percentiles. */
export function update(stats) {
  ahead = stats.now - ours();
  const last = marks.at(-1);
  if (last && Math.floor(last[SECOND]) === Math.floor(stats.totals[SECOND])) marks.pop();
  marks.push(stats.totals);
  while (marks.length > 3 * SECONDS) marks.shift();
  delays("ttft", stats.first_token);
  delays("itl", stats.between_tokens);
  draw();
}

function delays(name, [p50, p90, p99, number]) {
  if (number) {
    byId(name).textContent = duration(p50);
    byId(`${name}-note`).textContent = `p90 ${duration(p90)} · p99 ${duration(p99)}`;
  }
}

/** The counters as they stood at a time: a step's counts belong to the second in which it ended. */
function at(second) {
  let found = marks[0];
  for (const mark of marks) {
    if (mark[SECOND] > second) break;
    found = mark;
  }
  return found;
}

/** What a counter grew by in each of the last seconds, the oldest first. */
function growth(index, now, seconds = SECONDS) {
  const series = [];
  let before = at(now - seconds)[index];
  for (let back = seconds - 1; back >= 0; back -= 1) {
    const value = at(now - back)[index];
    series.push(value - before);
    before = value;
  }
  return series;
}

const sum = (series) => series.reduce((total, value) => total + value, 0);

/** Once a second, too, so that what has ended falls to zero. */
export function draw() {
  if (!marks.length) return;
  const now = serverNow();
  const [sampled, queried, hit, read, unshared] =
    [SAMPLED, QUERIED, HIT, READ, UNSHARED].map((index) => growth(index, now));
  const last = marks.at(-1);

  const recent = sum(queried) > 0;
  const [hits, queries] = recent ? [sum(hit), sum(queried)] : [last[HIT], last[QUERIED]];
  byId("hit-rate").textContent = queries ? percent(hits / queries) : "–";
  byId("hit-note").textContent = queries
    ? `${short(hits)} of ${short(queries)} tokens` : "of prompt tokens";
  byId("hit-note").title = recent ? "in the last minute" : "in all";
  spark("hit-spark", ratio(hit, queried), 1);

  const reading = sum(read) > 0;
  const [reads, alone] = reading ? [sum(read), sum(unshared)] : [last[READ], last[UNSHARED]];
  byId("kv-rate").textContent = reads ? `${(alone / reads).toFixed(2)}×` : "–";
  if (reads) byId("kv-rate").append(small(" less"));
  byId("kv-note").textContent = reads ? `${short(reads)} read, ${short(alone)} unshared` : "than without sharing";
  spark("kv-spark", ratio(unshared, read));

  const rate = sum(sampled.slice(-5)) / 5;
  byId("tokens-rate").textContent = short(rate);
  byId("tokens-rate").append(small(" tok/s"));
  byId("tokens-note").textContent = `${short(last[SAMPLED])} generated in all`;
  spark("tokens-spark", sampled);
}

function small(text) {
  const element = document.createElement("small");
  element.textContent = text;
  return element;
}

const ratio = (above, below) => above.map((value, index) => (below[index] ? value / below[index] : null));

/** A line over the last minute; gaps are bridged by the value before. */
function spark(id, series, most = Math.max(...series, 1e-9)) {
  const svg = byId(id);
  svg.setAttribute("viewBox", `0 0 ${SECONDS} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  let value = null;
  const points = [];
  series.forEach((next, index) => {
    value = next ?? value;
    if (value !== null) points.push(`${index},${(19 - 18 * Math.min(value / most, 1)).toFixed(1)}`);
  });
  const path = svg.firstChild ?? svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path"));
  path.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
}

export function requests(part) {
  byId("running").textContent = part.num_running;
  byId("running").append(small(" running"));
  const sequences = count(part.num_holders, "sequence");
  byId("waiting-note").textContent = `${part.num_waiting} waiting · ${sequences}`;
}
