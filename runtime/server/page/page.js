// The page as a whole: finds out what the server has, sends prompts, and looks at it again and again.
// @ts-check

import { changes } from "./admin.js";
import { ask, exists, keepKeys, keys, Refused } from "./api.js";
import { Panel } from "./chat.js";
import { find, findAll, say } from "./dom.js";
import { Live } from "./live.js";

const PERIOD_MS = 2000;
const server = { base: "", adapters: [], isChat: true, canChange: false, isMet: false };
const panels = [new Panel("First", server), new Panel("Second", server)];
const live = new Live(changes(() => look()));
const composer = find("#composer");
let asking = null; // the AbortController of what is under way
let isLocked = false; // a key is missing: nothing is asked until there is another one

// ------------------------------------------------------------------------------------- the server

/** Find out what does not change: whether there is a chat template, and who changes adapters. */
async function meet() {
  const body = { messages: [{ role: "user", content: "." }] };
  const refusal = await ask("tokenize", { body }).then(() => null, (error) => error);
  server.isChat = refusal?.status !== 400;
  server.canChange = await exists("v1/load_lora_adapter");
  find("#no-template").hidden = server.isChat;
  for (const element of findAll(".admin")) element.hidden = !server.canChange;
  server.isMet = true;
}

async function readModels() {
  const cards = (await (await ask("v1/models")).json()).data;
  server.base = cards.find(({ parent }) => parent === null)?.id ?? "";
  server.adapters = cards.filter(({ parent }) => parent !== null).map(({ id }) => id);
  for (const panel of panels) panel.offer(server);
  say(find("#served"), server.base);
  document.title = `${server.base} - trt-lora`;
}

async function look() {
  try {
    if (!server.isMet) await meet();
    if (!server.base) await readModels();
    const names = await live.look(server);
    const isKnown = String(names) === String([...server.adapters].sort()); // no name has a comma
    if (!isKnown) await readModels();
    trouble("");
  } catch (error) {
    isLocked = error instanceof Refused && error.status === 401;
    if (isLocked) find("#keys").open = true;
    trouble(error.message + (isLocked ? ": the server asks for a key; give it under Keys" : ""));
  }
}

function trouble(text) {
  say(find("#trouble"), text);
  find("#trouble").hidden = !text;
}

async function follow() {
  if (!document.hidden && !isLocked && !find("#pause").checked) await look();
  setTimeout(follow, PERIOD_MS);
}

// --------------------------------------------------------------------------------------- the chat

async function send() {
  const given = new FormData(composer);
  const prompt = String(given.get("prompt"));
  if (!prompt.trim() || asking) return;
  asking = new AbortController();
  setBusy(true);
  find("#prompt").value = "";
  find("#prompt").focus();
  const how = { isChat: server.isChat, signal: asking.signal };
  const shown = panels.filter(({ root }) => root.isConnected);
  await Promise.all(shown.map((panel) => panel.ask(prompt, options(given), how)));
  asking = null;
  setBusy(false);
}

/** @returns {Record<string, number>} what is left empty is the server's to choose */
function options(given) {
  const told = ["temperature", "max_tokens", "seed"].filter((name) => given.get(name));
  return Object.fromEntries(told.map((name) => [name, Number(given.get(name))]));
}

function setBusy(isBusy) {
  find("#stop").disabled = !isBusy;
  find("[type=submit]", composer).disabled = isBusy;
}

function compare() {
  if (composer.elements.compare.checked) find("#panels").append(panels[1].root);
  else panels[1].root.remove();
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
find("#prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") asking?.abort();
});
find("#stop").addEventListener("click", () => asking?.abort());
find("#clear").addEventListener("click", () => panels.forEach((panel) => panel.clear()));
composer.elements.compare.addEventListener("change", compare);

// --------------------------------------------------------------------------------------- the keys

const keyForm = find("#keys form");
keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  const { api, admin } = keyForm.elements;
  keepKeys({ api: api.value, admin: admin.value });
  isLocked = false;
  look();
});
for (const [name, key] of Object.entries(keys())) keyForm.elements[name].value = key;

find("#panels").append(panels[0].root);
compare(); // a browser that comes back to the page keeps what was checked
follow();
