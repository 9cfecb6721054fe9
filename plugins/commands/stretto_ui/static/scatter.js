// Rewards of samples against their lengths, with the distribution of each beside it.
import { h, number, printable, svg } from "./dom.js";

const WIDTH = 760, HEIGHT = 240, LEFT = 46, BOTTOM = 22, BESIDE = 60, ABOVE = 40, BINS = 30;

/**
 * @param {{points: [string, number, number][], total: number}} answer id, reward and sampled tokens of each sample
 * @param {(id: string) => string} address of a sample
 */
export function scatter({ points, total }, address) {
  if (points.length < 2) return h("p", { class: "muted" }, "Fewer than two of these samples have a reward.");
  const right = WIDTH - BESIDE - 8, low = HEIGHT - BOTTOM, top = ABOVE + 8;
  const lengths = scale(points.map(([, , length]) => length), LEFT + 6, right - 6), rewards = scale(points.map(([, reward]) => reward), low - 8, top + 8);
  // Many rewards are equal: points spread a little around them.
  const jitter = (index) => 10 * (((index * 0.618034) % 1) - 0.5);
  const dots = points.map(([id, reward, length], index) => svg("a", { href: address(id) }, svg("circle", { cx: lengths.at(length).toFixed(1), cy: (rewards.at(reward) + jitter(index)).toFixed(1), r: 2.6 }, svg("title", {}, `${printable(id)}: reward ${number(reward)}, ${number(length)} tokens`))));
  const bar = (x, y, width, height) => svg("rect", { x, y, width, height });
  const above = lengths.bins(BINS).map(({ from, to, share }) => bar(from, ABOVE * (1 - share), to - from - 1, ABOVE * share));
  const beside = rewards.bins(BINS / 2).map(({ from, to, share }) => bar(right + 8, to + 1, BESIDE * share, from - to - 1));
  const text = (x, y, content, anchor = "start") => svg("text", { x, y, "text-anchor": anchor }, content);
  const words = [lengths.high > lengths.low && text(lengths.at(lengths.low), HEIGHT - 6, number(lengths.low)), text(lengths.at(lengths.high), HEIGHT - 6, `${number(lengths.high)} sampled tokens`, "end"),
    rewards.high > rewards.low && text(LEFT - 6, rewards.at(rewards.low) + 4, number(rewards.low), "end"),
    text(LEFT - 6, rewards.at(rewards.high) + 4, number(rewards.high), "end"), text(LEFT, top - 4, "reward", "end")].filter(Boolean);
  const frame = svg("path", { class: "frame", d: `M${LEFT} ${top}V${low}H${right}` });
  return h("div", {}, svg("svg", { class: "scatter", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "group", "aria-label": `Reward against length of ${number(total)} samples` }, svg("g", { class: "bins" }, ...above, ...beside), frame, ...dots, ...words),
    h("p", { class: "faint" }, `${number(total)} samples${total > points.length ? `, ${number(points.length)} of them shown` : ""}; equal rewards are spread a little.`));
}

/** From values to places between two ends, and the shares of values in equal parts: the fullest part has the share 1. */
function scale(values, start, end) {
  const low = values.reduce((one, other) => Math.min(one, other)), high = values.reduce((one, other) => Math.max(one, other));
  const margin = high > low ? 0 : 0.5, share = (value) => (value - low + margin) / (high - low + 2 * margin);
  function bins(count) {
    const counts = Array(count).fill(0);
    for (const value of values) counts[Math.min(count - 1, Math.floor(count * share(value)))] += 1;
    const most = counts.reduce((one, other) => Math.max(one, other)), edge = (bin) => start + (bin / count) * (end - start);
    return counts.map((each, bin) => ({ from: edge(bin), to: edge(bin + 1), share: each / most }));
  }
  const at = (value) => start + share(value) * (end - start);
  return { low, high, at, bins };
}
