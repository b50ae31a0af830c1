// Requests to the server that has sent this page: by its public API, with the keys of this tab.
// @ts-check

const KEPT = "trt-lora-keys"; // in sessionStorage, which ends with the tab

/** What the server has refused, in its own words. */
export class Refused extends Error {
  /** @param {number} status @param {string} text */
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

let kept = { api: "", admin: "" };
try {
  kept = { ...kept, ...JSON.parse(sessionStorage.getItem(KEPT) ?? "{}") };
} catch {
  // A browser may have no storage: then a reload forgets them.
}

export const keys = () => kept;

/** @param {{api: string, admin: string}} given */
export function keepKeys(given) {
  kept = given;
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(given));
  } catch {
    // See above.
  }
}

/**
 * @param {string} path relative to the page, which may lie behind a proxy's prefix
 * @param {{body?: object, signal?: AbortSignal, admin?: boolean}} [options]
 * @returns {Promise<Response>} none of a refusal
 */
export async function ask(path, { body, signal, admin = false } = {}) {
  const key = (admin && kept.admin) || kept.api;
  const headers = new Headers({ Accept: "application/json" });
  if (key) headers.set("Authorization", `Bearer ${key}`);
  if (body) headers.set("Content-Type", "application/json");
  const method = body ? "POST" : "GET";
  const sent = { method, headers, signal, body: body && JSON.stringify(body) };
  const response = await fetch(path, sent).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("the server does not answer");
  });
  if (response.ok) return response;
  throw new Refused(response.status, said(await response.text(), response.status));
}

/**
 * The events of a stream, as they come.
 * @param {string} path @param {object} body @param {AbortSignal} signal
 */
export async function* stream(path, body, signal) {
  const response = await ask(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the answer has broken off");
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      if (!event.startsWith("data: ")) continue; // a comment, which keeps the connection alive
      const found = JSON.parse(event.slice("data: ".length));
      if (found.error) throw new Refused(found.error.code, errorText(found.error));
      yield found;
    }
  }
}

/** Whether a route exists; no key is asked for that. */
export async function exists(path) {
  return (await fetch(path, { method: "OPTIONS" })).status !== 404;
}

function said(text, status) {
  try {
    return errorText(JSON.parse(text).error);
  } catch {
    return text || `status ${status}`;
  }
}

const errorText = (error) => (typeof error === "string" ? error : error.message);
