// The server's feed: server-sent events over fetch, which, unlike EventSource, can send a key.

const KEY = "radixkv-key";

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";

/** Headers of a request to the own server, with the key if there is one. */
export function headers(more = {}) {
  const key = apiKey();
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

/** Ask for an API key, once however many ask for it; resolves when one was given. */
let asking = null;
export function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const field = document.getElementById("key");
    field.value = "";
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, field.value);
      field.value = "";
      asking = null;
      resolve();
    }, { once: true });
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.showModal();
  });
  return asking;
}

/** A response's server-sent events, as {event, data} with data as text. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer += value.replaceAll("\r\n", "\n");
      for (let end; (end = buffer.indexOf("\n\n")) >= 0; buffer = buffer.slice(end + 2)) {
        let event = "message";
        const data = [];
        for (const line of buffer.slice(0, end).split("\n")) {
          if (line.startsWith("event:")) event = line.slice(6).trim();
          else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        }
        if (data.length) yield { event, data: data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const pause = (milliseconds) => new Promise((resolve) => { setTimeout(resolve, milliseconds); });

/** Resolves once somebody can see the page. */
async function seen() {
  while (document.visibilityState === "hidden") {
    await new Promise((resolve) => { document.addEventListener("visibilitychange", resolve, { once: true }); });
  }
}

/** Hand each part of each snapshot to its function, for as long as somebody can see the page. */
export async function follow(parts, onState) {
  let leaving = new AbortController();
  const leave = () => leaving.abort();
  addEventListener("pagehide", leave);
  document.addEventListener("visibilitychange", () => { if (document.visibilityState === "hidden") leave(); });
  for (let wait = 500; ; wait = Math.min(wait * 2, 10_000)) {
    await seen();
    leaving = new AbortController();
    try {
      const response = await fetch("/page/feed", { headers: headers(), cache: "no-store", signal: leaving.signal });
      if (response.status === 401) {
        onState("locked");
        await askForKey();
        wait = 250;
        continue;
      }
      if (!response.ok) throw new Error(`the server answered ${response.status}`);
      for await (const { event, data } of eventsOf(response)) {
        wait = 250;
        onState("live");
        parts[event]?.(JSON.parse(data));
      }
    } catch (error) {
      if (!(error instanceof TypeError) && error.name !== "AbortError") console.warn("radixkv:", error.message);
    }
    onState("lost");
    await pause(wait);
  }
}
