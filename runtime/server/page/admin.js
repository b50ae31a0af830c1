// Adapters loaded, unloaded and pinned from the page, where the server has routes for it.
// @ts-check

import { ask } from "./api.js";
import { find, make, say } from "./dom.js";

/** @param {() => void} changed is called after each change */
export function changes(changed) {
  const act = async (told, path, body) => {
    say(find("#changed"), "");
    try {
      say(find("#changed"), told(await (await ask(path, { body, admin: true })).json()));
    } catch (error) {
      say(find("#changed"), error.message);
    }
    changed();
  };

  find("#load").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = new FormData(event.target);
    act(loaded, "v1/load_lora_adapter", {
      lora_name: given.get("lora_name"),
      lora_path: given.get("lora_path"),
      load_inplace: given.has("load_inplace"),
    });
  });

  const buttons = ({ name }, cell) => {
    const pin = make("button", { type: "button" });
    pin.addEventListener("click", () => {
      const what = pin.dataset.what;
      const path = `v1/lora_adapters/${encodeURIComponent(name)}/${what}`;
      act(() => `${name} is ${what}ned`, path, {});
    });
    const unload = make("button", { type: "button", "aria-label": `Unload ${name}` }, "Unload");
    twice(unload, () => act(unloaded, "v1/unload_lora_adapter", { lora_name: name, wait: true }));
    cell.append(pin, " ", unload);
    return pin;
  };

  /** Fill the last cell of an adapter's row. */
  return (adapter, cell) => {
    const pin = find("button", cell) ?? buttons(adapter, cell);
    pin.dataset.what = adapter.pinned ? "unpin" : "pin";
    say(pin, adapter.pinned ? "Unpin" : "Pin");
    pin.setAttribute("aria-label", `${pin.textContent} ${adapter.name}`);
  };
}

/** A button that asks first: one press changes its words, the next acts, leaving takes it back. */
function twice(button, act) {
  const [text, label] = [button.textContent, button.getAttribute("aria-label")];
  const ask = (prefix) => {
    say(button, prefix + text);
    button.setAttribute("aria-label", prefix + label);
  };
  button.addEventListener("click", () => {
    const isSure = button.textContent !== text;
    ask(isSure ? "" : "Really ");
    if (isSure) act();
  });
  button.addEventListener("blur", () => ask(""));
}

function loaded({ name, version, rank, milliseconds: ms, warnings }) {
  const told = `${name} is loaded: generation ${version}, rank ${rank}, in ${ms} ms`;
  return [told, ...warnings].join("; ");
}

const unloaded = ({ name, bytes_freed: bytes }) =>
  `${name} is unloaded, ${(bytes / 1e6).toFixed(1)} MB are free`;
