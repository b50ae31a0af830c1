// What the server says of itself, asked again and again: tables of adapters, requests, and lines.
// @ts-check

import { ask } from "./api.js";
import { find, fillRows, say } from "./dom.js";
import { Lines } from "./lines.js";
import { between, histogram, named, parse, total } from "./metrics.js";

const FIRST = "vllm:time_to_first_token_seconds";
// The newer is by row; a server that has none is asked for the time between events of an answer.
const GAPS = ["trt_lora:step_gap_seconds", "vllm:inter_token_latency_seconds"];

/**
 * @typedef {{name: string, version: number, sha256: string, rank: number, bytes: number,
 *   level: "slot" | "memory" | "disk", slot: number | null, leases: number, pinned: boolean,
 *   running: number, waiting: number}} Adapter
 */

export class Live {
  /** @param {(adapter: Adapter, cell: HTMLElement) => void} change fills the cell of changes */
  constructor(change) {
    this.change = change;
    this.charts = { first: new Lines(find("#first")), gap: new Lines(find("#gap")) };
    /** @type {Record<string, import("./metrics.js").Histogram>} at the last look */
    this.last = {};
  }

  /**
   * Look once, and show what there is.
   * @param {{base: string, canChange: boolean}} server
   * @returns {Promise<string[]>} the names of the adapters
   */
  async look({ base, canChange }) {
    const paths = ["v1/lora_adapters", "metrics", "load"];
    const [known, metrics, load] = await Promise.all(paths.map((path) => ask(path)));
    /** @type {Adapter[]} */
    const adapters = (await known.json()).data;
    adapters.sort((a, b) => a.name.localeCompare(b.name));
    const samples = parse(await metrics.text());
    const state = stateOf(samples, adapters, (await load.json()).server_load);
    this.showAdapters(adapters, state, canChange);
    showRequests(adapters, state, base);
    this.showTimes(samples);
    return adapters.map(({ name }) => name).sort();
  }

  showAdapters(adapters, { slots, inSlots }, canChange) {
    const listed = adapters.filter(({ slot }) => slot !== null).length;
    const blends = inSlots > listed ? `, ${inSlots - listed} by blends of requests` : "";
    const none = "This engine has no slots: every adapter in memory can be used at once.";
    say(find("#slots"), slots ? `${inSlots} of ${slots} slots are in use${blends}.` : none);
    fillRows(find("#adapter-rows"), adapters, {
      heading: 1,
      key: ({ name }) => name,
      cells: (a) => [
        ...[a.slot ?? "-", a.name, a.version, a.rank || "-", (a.bytes / 1e6).toFixed(1), a.level],
        ...[a.leases, a.pinned ? "yes" : "no"],
      ],
      last: canChange ? this.change : undefined,
    });
  }

  showTimes(samples) {
    const gap = GAPS.find((name) => named(samples, `${name}_count`).length) ?? GAPS[1];
    for (const [place, name] of Object.entries({ first: FIRST, gap })) {
      const now = histogram(samples, name);
      const before = this.last[name] ?? now;
      this.charts[place].add({ at: Date.now(), value: between(before, now) });
      this.last[name] = now;
    }
  }
}

function stateOf(samples, adapters, underWay) {
  const usage = total(samples, "vllm:kv_cache_usage_perc");
  const running = total(samples, "vllm:num_requests_running");
  const info = named(samples, "vllm:lora_requests_info")[0];
  const levels = named(samples, "trt_lora:adapters");
  const ofAdapters = (field) => adapters.reduce((sum, adapter) => sum + adapter[field], 0);
  // What no adapter has is the base model's, or a blend's.
  const others = Math.max(underWay - ofAdapters("running") - ofAdapters("waiting"), 0);
  const othersRunning = Math.min(Math.max(running - ofAdapters("running"), 0), others);
  return {
    usage,
    running,
    slots: Number(info?.labels.max_lora ?? 0),
    inSlots: total(levels.filter(({ labels }) => labels.level === "slot"), "trt_lora:adapters"),
    others: { running: othersRunning, waiting: others - othersRunning },
    refused: named(samples, "vllm:admission_rejections_total").filter(({ value }) => value),
  };
}

function showRequests(adapters, state, base) {
  const { usage, running, others, refused, slots } = state;
  find("#rows").value = usage;
  say(find("#rows-text"), `${running} (${Math.round(100 * usage)} %)`);
  const row = usage < 1 ? "its first token" : "a row";
  const reasons = { slot: row, memory: slots ? "a slot" : row, disk: "its adapter to be read" };
  const rest = { name: `${base}, and blends`, level: "slot", ...others };
  fillRows(
    find("#queue-rows"),
    [rest, ...adapters.filter(({ running, waiting }) => running || waiting)],
    {
      heading: 0,
      key: (item) => (item === rest ? "" : item.name),
      cells: (a) => [a.name, a.running, a.waiting, a.waiting ? reasons[a.level] : "-"],
    },
  );
  const told = refused.map(({ labels, value }) => `${value} for ${labels.reason}`).join(", ");
  say(find("#refused"), told && `Refused since the start: ${told}`);
}
