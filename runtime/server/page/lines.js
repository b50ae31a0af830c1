// A chart of seconds over the last minutes: the mean, and the 99th percentile as a dashed line.
// @ts-check

import { make, say } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [300, 80];
const [SHOWN_MS, BRIDGED_MS] = [300_000, 15_000];

/** @typedef {{at: number, value: {mean: number, p99: number} | null}} Point `at` in milliseconds */

export class Lines {
  /** @param {HTMLElement} figure with a caption */
  constructor(figure) {
    this.title = figure.textContent;
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    this.top = make("span");
    this.now = make("p", { class: "soft" });
    const legend = make("p", { class: "legend soft" }, "solid: mean, dashed: 99 of 100 are below");
    figure.append(make("div", { class: "axis soft" }, this.top, make("span", {}, "5 minutes wide")));
    figure.append(this.svg, this.now, legend);
    /** @type {Point[]} */
    this.points = [];
    this.draw();
  }

  /** @param {Point} point the newest */
  add(point) {
    this.points.push(point);
    this.points = this.points.filter(({ at }) => at > point.at - SHOWN_MS);
    this.draw();
  }

  draw() {
    const known = this.points.flatMap(({ value }) => (value ? [value] : []));
    const last = known.at(-1);
    const top = Math.max(0.001, ...known.map(({ p99, mean }) => Math.max(p99, mean)));
    say(this.top, `${milliseconds(top)} at the top`);
    const text = last
      ? `last: mean ${milliseconds(last.mean)}, 99 of 100 below ${milliseconds(last.p99)}`
      : "no token yet";
    say(this.now, text);
    this.svg.setAttribute("aria-label", `${this.title} over the last 5 minutes; ${text}`);
    this.svg.replaceChildren(this.path("mean", top), this.path("p99", top));
  }

  /** @param {"mean" | "p99"} which @param {number} top seconds at the upper edge */
  path(which, top) {
    const end = this.points.at(-1)?.at ?? 0;
    let path = "";
    let before = -Infinity; // a line ends where nothing was observed for a while
    for (const { at, value } of this.points) {
      if (!value) continue;
      const x = WIDTH * (1 - (end - at) / SHOWN_MS);
      const y = (HEIGHT - 2) * (1 - value[which] / top) + 1;
      const isNew = at - before > BRIDGED_MS;
      path += `${isNew ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}${isNew ? "h-0.5" : ""}`;
      before = at;
    }
    const made = document.createElementNS(SVG, "path");
    made.setAttribute("d", path);
    made.setAttribute("class", which);
    return made;
  }
}

/** @param {number} seconds */
export function milliseconds(seconds) {
  const ms = 1000 * seconds;
  return `${ms < 10 ? ms.toFixed(1) : Math.round(ms).toLocaleString("en")} ms`;
}
