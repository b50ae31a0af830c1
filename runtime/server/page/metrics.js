// Prometheus' text format, as far as the page reads it: sums, and what two times differ by.
// @ts-check

/** @typedef {{name: string, labels: Record<string, string>, value: number}} Sample */
/** @typedef {{sum: number, count: number, buckets: [number, number][]}} Histogram */

const LINE = /^([\w:]+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** @param {string} text @returns {Sample[]} */
export function parse(text) {
  const found = [];
  for (const line of text.split("\n")) {
    const [, name, labels, value] = line.match(LINE) ?? [];
    if (!name) continue; // a comment
    const pairs = [...(labels ?? "").matchAll(LABEL)].map(([, key, told]) => [key, told]);
    found.push({ name, labels: Object.fromEntries(pairs), value: Number(value) });
  }
  return found;
}

/** @param {Sample[]} samples @param {string} name @returns {Sample[]} */
export const named = (samples, name) => samples.filter((sample) => sample.name === name);

/** @param {Sample[]} samples @param {string} name */
export const total = (samples, name) =>
  named(samples, name).reduce((sum, { value }) => sum + value, 0);

/** @param {Sample[]} samples @param {string} name @returns {Histogram} */
export function histogram(samples, name) {
  const bounds = new Map();
  for (const { labels, value } of named(samples, `${name}_bucket`)) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    bounds.set(bound, (bounds.get(bound) ?? 0) + value);
  }
  const buckets = /** @type {[number, number][]} */ ([...bounds].sort(([a], [b]) => a - b));
  return { sum: total(samples, `${name}_sum`), count: total(samples, `${name}_count`), buckets };
}

/**
 * What was observed between two looks: the mean, which is exact, and the 99th percentile, which is
 * as exact as the buckets; null where nothing was.
 * @param {Histogram} before @param {Histogram} after
 */
export function between(before, after) {
  const count = after.count - before.count;
  if (count <= 0) return null;
  const mean = (after.sum - before.sum) / count;
  let low = 0;
  let below = 0;
  for (const [place, [bound, value]] of after.buckets.entries()) {
    const upTo = value - (before.buckets[place]?.[1] ?? 0);
    if (upTo >= 0.99 * count) {
      if (bound === Infinity) return { count, mean, p99: low };
      const p99 = low + ((bound - low) * (0.99 * count - below)) / (upTo - below);
      return { count, mean, p99 };
    }
    [low, below] = [bound, upTo];
  }
  return { count, mean, p99: low };
}
