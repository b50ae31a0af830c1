// One column of the chat: the adapters that answer, how strongly, and the conversation with them.
// @ts-check

import { stream } from "./api.js";
import { copy, find, make, say } from "./dom.js";

/** @typedef {{base: string, adapters: string[]}} Models */

const STREAMED = { stream: true, stream_options: { include_usage: true } };

export class Panel {
  /** @param {string} label that tells it from another one @param {Models} models */
  constructor(label, models) {
    this.root = copy("panel");
    this.root.setAttribute("aria-label", label);
    this.label = label;
    this.log = find(".log", this.root);
    this.log.setAttribute("aria-label", `${label}: conversation`);
    this.models = models;
    /** @type {{role: string, content: string}[]} what the next answer goes on from */
    this.messages = [];
    this.add = find(".add", this.root);
    this.add.addEventListener("click", () => find("select", this.addPart()).focus());
    this.addPart();
  }

  /** Take a new list of models; what is chosen stays, if it is still there. */
  offer(/** @type {Models} */ models) {
    this.models = models;
    for (const part of this.parts()) this.fill(part);
  }

  clear() {
    this.messages = [];
    this.log.replaceChildren();
  }

  /** @returns {HTMLElement[]} */
  parts() {
    return [...find(".parts", this.root).children];
  }

  addPart() {
    const part = copy("part");
    const isFirst = !this.parts().length;
    find(".remove", part).hidden = isFirst;
    find(".remove", part).addEventListener("click", () => {
      part.remove();
      this.number();
      this.add.focus();
    });
    find("input", part).addEventListener("input", () => this.show(part));
    find("select", part).addEventListener("change", () => this.show(part));
    find(".parts", this.root).append(part);
    this.number();
    this.fill(part);
    return part;
  }

  number() {
    this.parts().forEach((part, place) => {
      part.setAttribute("aria-label", `${this.label}: model ${place + 1}`);
    });
  }

  fill(part) {
    const select = find("select", part);
    const isFirst = part === this.parts()[0];
    const { base, adapters } = this.models;
    const names = isFirst && base ? [base, ...adapters] : adapters;
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    if (names.includes(chosen)) select.value = chosen;
    this.add.disabled = !adapters.length;
    this.show(part);
  }

  /** Say a strength; the base model has none. */
  show(part) {
    const slider = find("input", part);
    slider.disabled = find("select", part).value === this.models.base;
    say(find(".value", part), slider.disabled ? "" : Number(slider.value).toFixed(2));
  }

  /** @returns {{name: string, scale: number}[]} none is the base model */
  chosen() {
    const parts = this.parts().map((part) => ({
      name: find("select", part).value,
      scale: Number(find("input", part).value),
    }));
    return parts.filter(({ name }) => name && name !== this.models.base);
  }

  /** What a body says of the model: its name, or the parts of a blend. */
  asked() {
    const parts = this.chosen();
    if (!parts.length) return { model: this.models.base };
    if (parts.length === 1 && parts[0].scale === 1) return { model: parts[0].name };
    return { model: this.models.base, lora: parts };
  }

  who() {
    const told = ({ name, scale }) => (scale === 1 ? name : `${name} × ${scale}`);
    return this.chosen().map(told).join(" + ") || this.models.base;
  }

  /**
   * Show a prompt, and its answer as it comes.
   * @param {string} prompt @param {Record<string, number>} options
   * @param {{isChat: boolean, signal: AbortSignal}} how
   */
  async ask(prompt, options, { isChat, signal }) {
    const { text, told } = this.begin(prompt, this.who());
    const question = { role: "user", content: prompt };
    const input = isChat ? { messages: [...this.messages, question] } : { prompt };
    const body = { ...this.asked(), ...input, ...options, ...STREAMED };
    const path = isChat ? "v1/chat/completions" : "v1/completions";
    const times = { start: performance.now(), first: 0, tokens: 0, end: "stopped" };
    this.log.setAttribute("aria-busy", "true"); // it is read out when it is whole
    try {
      for await (const event of stream(path, body, signal)) this.take(event, text, times);
      say(told, summary(times));
    } catch (error) {
      if (error.name === "AbortError") say(told, summary(times));
      else told.replaceWith(make("p", { class: "error" }, error.message));
    } finally {
      this.log.removeAttribute("aria-busy");
    }
    if (text.data) this.messages.push(question, { role: "assistant", content: text.data });
  }

  begin(prompt, who) {
    const text = document.createTextNode("");
    const told = make("p", { class: "soft" }, "waits for its first token");
    const answer = make("div", { class: "text", dir: "auto" });
    answer.append(text);
    this.log.append(
      make("div", { class: "question text", dir: "auto" }, prompt),
      make("div", { class: "answer" }, make("p", { class: "who" }, who), answer, told),
    );
    this.log.scrollTop = this.log.scrollHeight;
    return { text, told };
  }

  take(event, text, times) {
    times.tokens = event.usage?.completion_tokens ?? times.tokens;
    const choice = event.choices[0];
    times.end = choice?.finish_reason ?? times.end;
    const more = choice?.delta?.content ?? choice?.text;
    if (!more) return;
    times.first ||= performance.now();
    const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    text.appendData(more);
    if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
  }
}

function summary({ start, first, tokens, end }) {
  if (!first) return `${end} without text`;
  const seconds = (performance.now() - first) / 1000;
  const speed = tokens > 1 && seconds > 0.01 ? `, ${Math.round((tokens - 1) / seconds)} tokens/s` : "";
  const count = tokens ? `${tokens} tokens, ` : "";
  return `${count}the first after ${Math.round(first - start)} ms${speed}; ${end}`;
}
