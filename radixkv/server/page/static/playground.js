// One chat that forks into four branches and joins again, over the server's own API of contexts.

import { askForKey, eventsOf, headers } from "./feed.js";
import { count } from "./numbers.js";

const BRANCHES = 4;
const SAMPLING = { max_tokens: 64, temperature: 0.9, top_p: 0.95 };

const byId = (id) => document.getElementById(id);
const form = byId("play-form");
const state = byId("play-state");

let context = null; // The id of the chat's context, once there is one.
let branches = []; // {id, card, tokens}

const say = (text, fault = false) => {
  state.textContent = text;
  state.classList.toggle("fault", fault);
};

/** A call of the API; throws what the server says is wrong. Asks for a key where one is wanted. */
async function call(path, body, method = "POST") {
  for (;;) {
    const response = await fetch(`/v1/contexts${path}`, {
      method, headers: headers({ "Content-Type": "application/json" }), body: body && JSON.stringify(body),
    });
    if (response.ok) return response;
    if (response.status === 401) {
      await askForKey();
      continue;
    }
    const { error } = await response.json().catch(() => ({}));
    throw Object.assign(new Error(error?.message ?? `the server answered ${response.status}`), { status: response.status });
  }
}

const ask = async (path, body) => (await call(path, body)).json();

function add(list, className, text) {
  const item = document.createElement("li");
  item.className = className;
  item.textContent = text;
  list.append(item);
  item.scrollIntoView({ block: "nearest" });
  return item;
}

function card(number) {
  const item = add(byId("play-branches"), "", "");
  const head = document.createElement("p");
  head.className = "head";
  const [name, tokens] = [document.createElement("span"), document.createElement("span")];
  name.textContent = `branch ${number + 1}`;
  head.append(name, tokens);
  const text = document.createElement("p");
  text.className = "text";
  item.append(head, text);
  return { item, text, tokens };
}

/** Write what one branch says as it comes; its result at the end. */
async function generate(branch) {
  const response = await call(`/${branch.id}/generate`, { ...SAMPLING, stream: true });
  for await (const { data } of eventsOf(response)) {
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    if (event.text) branch.card.text.append(event.text);
    if (event.result) {
      const { text, token_ids: ids, num_cached_tokens: cached } = event.result;
      branch.card.text.textContent = text;
      branch.card.tokens.textContent = `${count(ids.length, "token")}, ${cached} cached`;
      branch.card.item.classList.add("done");
      return;
    }
  }
  throw new Error("the stream ended before its result");
}

/** Ask, fork into four, and let all four go on at the same time. */
async function fork(text) {
  const content = [{ role: "user", content: text }];
  if (context === null) context = (await ask("", { content })).id;
  else await ask(`/${context}/append`, { content });
  add(byId("play-said"), "user", text);
  const { branches: ids } = await ask(`/${context}/fork`, { n: BRANCHES });
  byId("play-branches").replaceChildren();
  branches = ids.map((id, number) => ({ id, card: card(number) }));
  say("four branches on the same blocks …");
  await Promise.all(branches.map(generate));
  for (const [number, branch] of branches.entries()) {
    const keep = document.createElement("button");
    keep.type = "button";
    keep.className = "plain keep";
    keep.textContent = "Keep this one";
    keep.setAttribute("aria-label", `Keep branch ${number + 1}`);
    keep.addEventListener("click", () => run(() => join(number)));
    branch.card.item.append(keep);
  }
  say("Join: keep one, or the likeliest of them.");
}

/** Go on with one branch, or with the likeliest; the others' own blocks go first from now on. */
async function join(number = null) {
  const scores = branches.map((_, index) => Number(index === number));
  const by = number === null ? "mean_logprob" : { scores };
  await ask(`/${context}/join`, { branches: branches.map((branch) => branch.id), mode: "best", by });
  const said = (await (await call(`/${context}`, undefined, "GET")).json()).generated;
  for (const branch of branches) {
    branch.card.item.querySelector(".keep")?.remove();
    const won = said.endsWith(branch.card.text.textContent);
    branch.card.item.classList.add(won ? "won" : "lost");
  }
  const winner = branches.find((branch) => branch.card.item.classList.contains("won"));
  add(byId("play-said"), "assistant", winner.card.text.textContent);
  branches = [];
  say("Joined: the chat goes on in the winner's blocks, the others' go first.");
}

async function forget() {
  const id = context;
  context = null;
  branches = [];
  byId("play-said").replaceChildren();
  byId("play-branches").replaceChildren();
  say("");
  if (id !== null) await call(`/${id}`, undefined, "DELETE");
}

/** One thing at a time, and whatever goes wrong is said. */
async function run(what) {
  const buttons = byId("play-form").querySelectorAll("button");
  for (const button of [...buttons, ...document.querySelectorAll(".keep")]) button.disabled = true;
  try {
    await what();
  } catch (error) {
    say(error.message, true);
    if ([404, 410].includes(error.status)) {
      context = null;
      branches = [];
    }
  }
  for (const button of [...buttons, ...document.querySelectorAll(".keep")]) button.disabled = false;
  byId("play-go").textContent = branches.length ? "Join the likeliest" : "Fork into four";
  byId("play-new").hidden = context === null;
}

export function begin() {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (branches.length) run(() => join());
    else if (byId("play-text").value.trim()) {
      run(async () => {
        await fork(byId("play-text").value.trim());
        byId("play-text").value = "";
      });
    } else say("Write a message first.");
  });
  byId("play-new").addEventListener("click", () => run(forget));
  byId("play-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!byId("play-go").disabled) form.requestSubmit();
    }
  });
  // Whoever leaves gives the blocks back at once; else the context's time would have to run out.
  addEventListener("pagehide", () => {
    if (context === null) return;
    fetch(`/v1/contexts/${context}`, { method: "DELETE", headers: headers(), keepalive: true }).catch(() => {});
  });
}
