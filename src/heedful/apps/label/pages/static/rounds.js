// Rounds of sampling, labelling and training side by side: numbers, win rates, curves, ten answers of each.
import { get } from "./api.js";
import { curves, intervals } from "./chart.js";
import { answer, prompt } from "./content.js";
import { el } from "./dom.js";
import { attempt, ready, start } from "./shell.js";
import { named, number, percent, t } from "./words.js";

const main = document.getElementById("main");
const SHARES = ["accuracy", "win_rate", "judge_win_rate", "agreement"];

function draw({ rounds, across }) {
  const head = el("div", { class: "page-head" }, el("h1", {}, t("page_rounds")), el("span", { class: "hint" }, t("rounds_hint")));
  if (!rounds.length) return main.replaceChildren(head, el("p", { class: "card notice" }, t("no_rounds")));
  return main.replaceChildren(head, numbers(rounds, across ?? {}), el("div", { class: "columns" }, wins(rounds), ...charts(rounds)), ...samples(rounds));
}

function numbers(rounds, across) {
  const rows = Object.entries(across).filter(([, values]) => values.some((value) => value !== null));
  const shown = (name, value) => (SHARES.includes(name) ? percent(value) : number(value, Number.isInteger(value) ? 0 : 3));
  return el("section", { class: "card scroll", tabindex: "0", role: "region", aria: { label: t("page_rounds") } }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, t("column_round")), rounds.map((one) => el("th", { class: "number", scope: "col" }, number(one.round))))),
    el("tbody", {}, el("tr", {}, el("th", { scope: "row" }, t("column_step")), rounds.map((one) => el("td", { class: "number" }, one.step === null ? t("round_done") : named("step", one.step)))),
      rows.map(([name, values]) => el("tr", {}, el("th", { scope: "row" }, named("across", name)), values.map((value) => el("td", { class: "number" }, shown(name, value))))))));
}

/** Win rates over the round before, by the reward model and by the judge if there is one. */
function wins(rounds) {
  const rows = rounds.flatMap((one) => [["over_previous", "win_by_model"], ["judge_over_previous", "win_by_judge"]].flatMap(([name, by]) => {
    const found = one.evaluate?.[name];
    if (typeof found?.win_rate !== "number") return [];
    const [low, high] = found.interval_95 ?? [found.win_rate, found.win_rate];
    return [[t(by, { n: one.round }), { value: found.win_rate, low, high }]];
  }));
  return rows.length ? el("section", { class: "card" }, el("h2", {}, t("win_rate")), intervals(t("win_rate"), rows, [{ value: 0.5 }])) : "";
}

/** One chart per curve, with a line for each round. */
function charts(rounds) {
  const found = new Map();
  for (const one of rounds) for (const [run, list] of Object.entries(one.curves ?? {})) for (const { name, unit, points } of list) {
    const key = `${run.split("-")[0]}|${name}`;
    if (!found.has(key)) found.set(key, { title: `${named("step", run.split("-")[0])}: ${named("curve", name)}`, unit, series: [] });
    if (!run.includes("-")) found.get(key).series.push({ name: t("round_n", { n: one.round }), points });
  }
  return [...found.values()].filter((one) => one.series.length).map(({ title, unit, series }) => el("section", { class: "card" }, el("h2", {}, `${title} (${named("unit", unit)})`), curves(title, series)));
}

/** Ten answers of each round, beside the previous policy's answer to the same prompt. */
function samples(rounds) {
  const score = (value, judge) => [value, judge].some((one) => typeof one === "number") ? ` · ${[typeof value === "number" ? t("score_n", { score: number(value, 2) }) : "", typeof judge === "number" ? t("judge_n", { score: number(judge, 2) }) : ""].filter(Boolean).join(" · ")}` : "";
  return [...rounds].reverse().filter((one) => one.answers?.length).map((one, at) => el("details", { class: "card changes", open: at === 0 }, el("summary", {}, t("answers_of", { n: one.round })),
    one.answers.map((sample) => el("section", { class: "sample" }, prompt(sample.prompt), el("div", { class: "samples" },
      sample.previous === undefined || sample.previous === null ? null : el("div", { class: "card" }, el("h2", {}, t("before_round"), score(sample.previous_score, sample.previous_judge)), answer(sample.previous)),
      el("div", { class: "card" }, el("h2", {}, t("after_round"), score(sample.score, sample.judge)), answer(sample.response)))))));
}

const me = await start();
const found = me && await attempt(() => get("/api/rounds"));
if (found) draw(found);
ready();
