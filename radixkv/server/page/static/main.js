// Puts the page together.

import { follow } from "./feed.js";
import * as figures from "./figures.js";
import { count } from "./numbers.js";
import * as panels from "./panels.js";
import * as playground from "./playground.js";
import * as pool from "./pool.js";
import * as tree from "./tree.js";

const byId = (id) => document.getElementById(id);
const STATES = { live: "live", lost: "connection lost, trying again", locked: "wants an API key" };

// -- the feed -------------------------------------------------------------------------------------

let treeNote = "";
const parts = {
  hello(hello) {
    byId("model").textContent = `${hello.model} · blocks of ${hello.block_size} tokens`;
    document.title = `${hello.model} · radixkv`;
    for (const part of [figures, tree, panels]) part.begin(hello);
  },
  tree(part) {
    const hidden = part.nodes.reduce((total, row) => total + row.at(-1), 0);
    treeNote = count(part.nodes.length, "node") + (hidden ? `, ${count(hidden, "more branch", "more branches")} not sent` : "");
    byId("tree-note").textContent = treeNote;
    tree.update(part, null);
  },
  holders(part) {
    tree.update(null, part);
    figures.requests(part);
    panels.showRequests(part);
  },
  pool: pool.update,
  stats(part) {
    figures.update(part);
    panels.showRemoved(part.removed);
  },
  removals: panels.showRemovals,
};

follow(parts, (state) => {
  byId("connection").dataset.state = state;
  byId("connection").textContent = STATES[state];
});
setInterval(() => {
  figures.draw();
  panels.drawRemovals();
}, 1000);
addEventListener("resize", pool.draw);
document.addEventListener("themechange", pool.draw);

// -- the tree's tools -----------------------------------------------------------------------------

byId("zoom-in").addEventListener("click", () => tree.zoomBy(1.25));
byId("zoom-out").addEventListener("click", () => tree.zoomBy(0.8));
byId("zoom-fit").addEventListener("click", tree.zoomToFit);
byId("expand").addEventListener("click", (event) => {
  const button = event.currentTarget;
  const all = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", String(all));
  tree.showAll(all);
});
byId("search").addEventListener("input", (event) => {
  const found = tree.search(event.target.value);
  byId("tree-note").textContent = found === null ? treeNote : `${found} found`;
});
byId("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter") tree.focusMatch();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.target.closest("input, textarea, dialog")) {
    event.preventDefault();
    byId("search").focus();
  }
});

playground.begin();
