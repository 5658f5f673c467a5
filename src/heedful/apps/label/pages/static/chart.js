// Small charts as inline SVG, drawn from numbers. Each has its numbers as text for screen readers.
import { svg } from "./dom.js";
import { number, percent } from "./words.js";

/** Width of a chart in units: fewer on a phone, so that letters keep their size. */
const isNarrow = () => matchMedia("(max-width: 759px)").matches;
const widthNow = () => (isNarrow() ? 340 : 560);
const COLOURS = 6; // style.css has them

/** Bars over days or other names. `rows` are [name, value]. */
export function bars(label, rows) {
  const [width, height] = [widthNow(), 150];
  const [left, right, top, bottom] = [40, width - 8, 12, height - 24];
  const most = Math.max(1, ...rows.map(([, value]) => value));
  const step = Math.min((right - left) / rows.length, 46);
  const shown = Math.ceil(rows.length / (isNarrow() ? 5 : 9));
  return svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${label}: ${rows.map(([name, value]) => `${name} ${value}`).join(", ")}` },
    svg("path", { class: "axis", d: `M${left} ${bottom}H${right}` }),
    svg("text", { x: left - 6, y: top + 6, "text-anchor": "end" }, number(most)), svg("text", { x: left - 6, y: bottom, "text-anchor": "end" }, "0"),
    rows.flatMap(([name, value], at) => {
      const high = ((bottom - top) * value) / most;
      const x = left + at * step;
      const bar = svg("rect", { class: "fill", x: x + step * 0.15, y: bottom - high, width: step * 0.7, height: high, rx: 2 });
      return at % shown ? [bar] : [bar, svg("text", { x: x + step / 2, y: height - 8, "text-anchor": "middle" }, String(name).slice(5))];
    }));
}

/** Shares with their 95 % intervals on a scale from 0 to 1. `rows` are [name, {value, low, high}]; `references` values or bands beside them. */
export function intervals(label, rows, references = []) {
  const [width, line] = [widthNow(), 26];
  const height = rows.length * line + 30;
  const [left, right] = [isNarrow() ? 124 : 150, width - 60];
  const x = (value) => left + (right - left) * value;
  const bottom = rows.length * line + 6;
  return svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${label}: ${rows.map(([name, one]) => `${name} ${percent(one.value)}`).join(", ")}` },
    [0, 0.25, 0.5, 0.75, 1].flatMap((value) => [svg("path", { class: "axis", d: `M${x(value)} 4V${bottom}` }), svg("text", { x: x(value), y: height - 8, "text-anchor": "middle" }, percent(value, 0))]),
    references.flatMap(({ value, half_width: half }) => [
      half ? svg("rect", { class: "band", x: x(value - half), width: x(value + half) - x(value - half), y: 4, height: bottom - 4 }) : null,
      svg("path", { class: "reference", d: `M${x(value)} 4V${bottom}` })]).filter(Boolean),
    rows.flatMap(([name, one], at) => {
      const y = at * line + 19;
      return [svg("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, name),
        svg("path", { class: "whisker", d: `M${x(one.low)} ${y}H${x(one.high)}` }), svg("circle", { class: "dot", cx: x(one.value), cy: y, r: 4 }),
        svg("text", { x: right + 8, y: y + 4 }, percent(one.value))];
    }));
}

/** Curves. `series` are {name, points: [[x, y], ...]}; each has a colour, with its name at the end of the line. */
export function curves(label, series, { from, to } = {}) {
  const [width, height] = [widthNow(), 190];
  const [left, right, top, bottom] = [52, width - 84, 12, height - 26];
  const points = series.flatMap((one) => one.points);
  const [xs, ys] = [points.map((p) => p[0]), points.map((p) => p[1])];
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  const [y0, y1] = [from ?? Math.min(...ys), to ?? Math.max(...ys)];
  const x = (value) => left + ((right - left) * (value - x0)) / (x1 - x0 || 1);
  const y = (value) => bottom - ((bottom - top) * (value - y0)) / (y1 - y0 || 1);
  const digits = Math.abs(y1 - y0) < 0.1 ? 3 : Math.abs(y1 - y0) < 10 ? 2 : 0;
  return svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${label}: ${series.map((one) => `${one.name} ${one.points.map((p) => p[1]).join(" ")}`).join("; ")}` },
    [y0, (y0 + y1) / 2, y1].flatMap((value) => [svg("path", { class: "axis", d: `M${left} ${y(value)}H${right}` }), svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value, digits))]),
    [x0, x1].map((value, at) => svg("text", { x: x(value), y: height - 8, "text-anchor": at ? "end" : "start" }, number(value))),
    series.flatMap((one, at) => {
      const last = one.points.at(-1);
      const colour = `series-${at % COLOURS}`;
      return [svg("polyline", { class: `line ${colour}`, points: one.points.map((p) => `${x(p[0])},${y(p[1])}`).join(" ") }),
        ...(one.points.length < 30 ? one.points.map((p) => svg("circle", { class: `dot ${colour}`, cx: x(p[0]), cy: y(p[1]), r: 3 })) : []),
        svg("text", { x: right + 6, y: y(last[1]) + 4, class: `name ${colour}` }, one.name)];
    }));
}
