// What of the tree is drawn, and where. A node is a bar; what follows it stands to its right, the
// first in the same row, the others below: so a conversation is a line, and a fork a trunk.
/* global d3 */

export const ROW = 27;
export const BAR = 19;
const GAP = 28;
const MARGIN = 14;
// Nodes that are drawn before anybody asks for more: those that are held, then the last used.
const MOST_AT_FIRST = 120;
const MOST_HOLDERS_AT_A_NODE = 6;

/** The feed's nodes as objects. */
export function readNodes({ nodes, texts, used }) {
  return nodes.map(([serial, above, space, start, blocks, tokens, holders, created, hits, hint, hidden], index) => ({
    id: `n${serial}`, kind: "node", serial, above, space, start, blocks, tokens, holders, created, hits, hint, hidden,
    text: texts[index], used: used[index],
  }));
}

export function readHolders(list) {
  return list.map((its) => ({ ...its, id: `h${its.key}`, kind: "holder", above: its.node }));
}

/** The ids of nodes that are drawn whatever is folded: what was searched for, with all above it. */
function withAncestors(found, bySerial) {
  const ids = new Set();
  for (let item of found) {
    for (; item && !ids.has(item.id); item = bySerial.get(item.above)) ids.add(item.id);
  }
  return ids;
}

/** The nodes that are drawn unless they are folded: all of them, or the most wanted. */
function wanted(nodes, all) {
  if (all || nodes.length <= MOST_AT_FIRST) return new Set(nodes.map((node) => node.id));
  const order = [...nodes].sort((a, b) => (b.holders > 0) - (a.holders > 0) || b.used - a.used || a.start - b.start);
  return new Set(order.slice(0, MOST_AT_FIRST).map((node) => node.id));
}

/**
 * How much hangs below each node, in powers of four: what is slight stands near its parent, and
 * what is alike stays in the order in which it came, so that rows seldom change places.
 */
function measure(children, spaces) {
  const weigh = (id) => {
    let weight = 1;
    for (const child of children.get(id) ?? []) {
      const below = weigh(child.id);
      child.bulk = Math.floor(Math.log2(below) / 2);
      weight += below;
    }
    return weight;
  };
  spaces.forEach((_, space) => weigh(`r${space}`));
}

function widthOf(item) {
  if (item.kind === "node") return Math.round(Math.min(90 + 80 * Math.sqrt(item.blocks), 1200));
  if (item.kind === "holder") return item.text ? 250 : 170;
  if (item.kind === "root") return Math.max(46, 16 + 7 * item.text.length);
  return 16 + 6.8 * item.text.length;
}

/**
 * The items to draw, in reading order, each with x, y (its row's middle), width, depth, and its
 * place among its siblings.
 *
 * view: {all: bool, open: Set of ids whose children are all drawn, shut: Set of ids whose
 * children are not, match: function of an item or null}
 */
export function layOut(spaces, nodes, holders, view) {
  const bySerial = new Map(nodes.map((node) => [node.serial, node]));
  const matches = view.match ? new Set([...nodes, ...holders].filter(view.match)) : new Set();
  const sought = withAncestors(matches, bySerial);
  const most = wanted(nodes, view.all);
  const children = new Map();
  const add = (id, item) => { children.get(id)?.push(item) ?? children.set(id, [item]); };
  const parentId = (item) => (bySerial.has(item.above) ? `n${item.above}` : `r${item.space}`);
  for (const node of nodes) add(parentId(node), node);
  measure(children, spaces);
  for (const siblings of children.values()) siblings.sort((a, b) => a.bulk - b.bulk || a.created - b.created || a.serial - b.serial);
  const atNode = new Map();
  for (const holder of holders) {
    const id = parentId(holder);
    const number = (atNode.get(id) ?? 0) + 1;
    atNode.set(id, number);
    if (number <= MOST_HOLDERS_AT_A_NODE || sought.has(holder.id) || view.open.has(id)) add(id, holder);
  }

  const under = (item) => {
    const below = children.get(item.id) ?? [];
    if (!below.length && !item.hidden) return [];
    item.folds = true;
    const shut = view.shut.has(item.id);
    const drawn = below.filter((child) => sought.has(child.id) ||
      (!shut && (child.kind === "holder" || most.has(child.id) || view.open.has(item.id))));
    const kept = new Set(drawn);
    const left = below.filter((child) => !kept.has(child) && child.kind === "node").length + (item.hidden ?? 0);
    const moreHolders = Math.max((atNode.get(item.id) ?? 0) - drawn.filter((child) => child.kind === "holder").length, 0);
    item.unfolded = drawn.length > 0;
    item.folded = left + moreHolders;
    if (!shut && (left || moreHolders)) drawn.push(moreOf(item, left, moreHolders));
    return drawn;
  };
  const roots = spaces.map((name, space) => ({ id: `r${space}`, kind: "root", text: name || "root", space }))
    .filter((root) => children.has(root.id));
  const whole = d3.hierarchy({ id: "", roots }, (item) => item.roots ?? under(item));

  const items = [];
  let row = 0;
  let width = 0;
  whole.eachBefore((place) => {
    if (!place.depth) return;
    const item = place.data;
    const above = place.parent;
    const first = above.children[0] === place;
    // The first child stays in its parent's row; at the top every root begins a row of its own.
    if (items.length && !(first && above.depth)) row += 1;
    item.parent = above.depth ? above.data : null;
    item.depth = place.depth;
    item.place = above.children.indexOf(place) + 1;
    item.siblings = above.children.length;
    item.width = widthOf(item);
    item.x = item.parent ? item.parent.x + item.parent.width + GAP : MARGIN;
    item.y = MARGIN + ROW / 2 + row * ROW;
    item.matches = matches.has(item);
    width = Math.max(width, item.x + item.width);
    items.push(item);
  });
  return { items, width: width + MARGIN, height: 2 * MARGIN + (row + 1) * ROW, matches: matches.size };
}

function moreOf(item, nodes, holders) {
  const parts = [];
  if (nodes) parts.push(`${nodes} more ${nodes === 1 ? "branch" : "branches"}`);
  if (holders) parts.push(`${holders} more ${holders === 1 ? "sequence" : "sequences"}`);
  return { id: `m${item.id}`, kind: "more", of: item, text: `+ ${parts.join(", ")}`, only: item.hidden === nodes && !holders };
}

/** From the end of what is above to the beginning of an item. */
export function linkTo(item) {
  const from = item.parent.x + item.parent.width;
  if (item.y === item.parent.y) return `M${from},${item.y}H${item.x}`;
  const trunk = from + 12;
  return `M${from},${item.parent.y}H${trunk - 5}q5,0 5,5V${item.y - 5}q0,5 5,5H${item.x}`;
}
