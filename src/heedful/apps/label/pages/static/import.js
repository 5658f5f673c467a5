// Imports a file: read in the browser, previewed before anything is added, errors with their lines.
import { get, post } from "./api.js";
import { answer, prompt } from "./content.js";
import { el } from "./dom.js";
import { attempt, ready, showBanner, start, toast } from "./shell.js";
import { decoded } from "./utf8.js";
import { withdraw } from "./withdraw.js";
import { number, t } from "./words.js";

const TASKS = ["", "pair", "ranking", "rating", "demonstration", "correction", "chat"];
const LARGEST = 64e6; // bytes, as the server allows
const SLOW = 300_000;
const SHOWN = 2000; // characters of a text in the preview
const ENDINGS = [".jsonl", ".json", ".csv", ".tsv"]; // as the server reads text
const main = document.getElementById("main");
/** The file's text and name; options come from the form. */
const file = { text: null, name: "" };

const me = await start();
if (me) {
  draw();
  await earlier();
}
ready();

function draw() {
  const input = el("input", { type: "file", accept: ENDINGS.join(), class: "unseen", id: "file", on: { click: () => { input.value = ""; }, change: () => take(input.files[0]) } }); // the same file, repaired, is a change too
  const drop = el("label", { class: "drop", for: "file", on: {
    dragover: (event) => { event.preventDefault(); drop.classList.add("over"); },
    dragleave: () => drop.classList.remove("over"),
    drop: (event) => { event.preventDefault(); drop.classList.remove("over"); take(event.dataTransfer.files[0]); } } },
  el("strong", {}, t("import_drop")), el("span", { class: "hint" }, t("import_formats")), el("span", { id: "file-name" }));
  const paste = el("textarea", { class: "code", rows: "5", spellcheck: "false", aria: { label: t("import_paste") }, placeholder: '{"prompt": "…", "responses": ["…", "…"]}', on: { input: () => { file.text = paste.value; file.name = t("import_pasted"); } } });
  const options = el("form", { class: "card", id: "options", on: { submit: (event) => { event.preventDefault(); preview(); } } },
    drop, input,
    el("details", { class: "changes" }, el("summary", {}, t("import_paste")), paste),
    el("div", { class: "form" },
      el("label", { class: "field" }, el("span", {}, t("import_task")), el("select", { name: "task" }, TASKS.map((name) => el("option", { value: name }, t(name ? `task_${name}` : "task_of_file"))))),
      el("label", { class: "field" }, el("span", {}, t("import_columns")), el("input", { type: "text", name: "columns", placeholder: "prompt=question,chosen=better" })),
      el("label", { class: "one-line" }, el("input", { type: "checkbox", name: "screening" }), el("span", {}, t("import_screening"))),
      el("label", { class: "one-line" }, el("input", { type: "checkbox", name: "gold" }), el("span", {}, t("import_gold"))),
      el("button", { type: "submit", class: "main" }, t("preview"))));
  main.replaceChildren(el("div", { class: "page-head" }, el("h1", {}, t("page_import")), el("span", { class: "hint" }, t("import_hint"))), options, el("div", { id: "result", class: "preview" }), el("div", { id: "earlier" }));
}

/** The imports so far; each can be withdrawn. */
async function earlier() {
  const found = await attempt(() => get("/api/batches"), { keepBanner: true });
  if (!found?.batches.length) return;
  const row = (one) => {
    const gone = one.items > 0 && one.withdrawn === one.items;
    return el("tr", {}, el("td", { dir: "auto" }, one.batch, one.withdrawn > 0 && el("div", { class: "hint" }, t("batch_withdrawn", { n: number(one.withdrawn) }))), el("td", { class: "hint" }, new Date(one.at).toLocaleString(document.documentElement.lang, { dateStyle: "short", timeStyle: "short" })),
      el("td", { class: "number" }, number(one.items)), el("td", { class: "number" }, number(one.labels)),
      el("td", {}, el("button", { type: "button", aria: { label: `${t(gone ? "put_back" : "withdraw")}: ${one.batch}` }, on: { click: () => withdraw({ batch: one.batch, back: gone }, earlier) } }, t(gone ? "put_back" : "withdraw"))));
  };
  document.getElementById("earlier").replaceChildren(el("section", { class: "card" }, el("h2", {}, t("earlier_imports")), el("div", { class: "scroll", tabindex: "0", role: "region", aria: { label: t("earlier_imports") } }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, t("column_batch")), el("th", { scope: "col" }, t("column_when")), el("th", { scope: "col", class: "number" }, t("column_items")), el("th", { scope: "col", class: "number" }, t("column_labels")), el("th", { scope: "col" }, el("span", { class: "unseen" }, t("withdraw"))))),
    el("tbody", {}, found.batches.map(row))))));
}

async function take(chosen) {
  if (!chosen) return;
  Object.assign(file, { text: null, name: "" });
  document.getElementById("file-name").textContent = "";
  document.getElementById("result").replaceChildren();
  if (chosen.size > LARGEST) return toast(t("import_too_large", { n: number(chosen.size / 1e6) }), "warn");
  if (!ending(chosen.name)) return showBanner(t("import_ending", { name: chosen.name }));
  const { text, fault } = decoded(new Uint8Array(await chosen.arrayBuffer()));
  Object.assign(file, { text, name: chosen.name });
  document.getElementById("file-name").textContent = `${chosen.name} · ${number(chosen.size / 1000, 1)} kB`;
  if (fault) return showBanner(t("import_not_utf8", { name: chosen.name, byte: fault.byte, line: fault.line }));
  return preview();
}

/** The extension of a file, which sets its format; undefined for others, such as pasted records. */
const ending = (name) => ENDINGS.find((one) => name.toLowerCase().endsWith(one));

const body = (more) => {
  const { task, columns, screening, gold } = document.getElementById("options").elements;
  return { text: file.text, name: file.name, format: ending(file.name) ?? ENDINGS[0], task: task.value, columns: columns.value.trim(), screening: screening.checked, gold: gold.checked, ...more };
};

async function preview() {
  if (!file.text) return toast(t("import_choose_first"), "warn");
  const found = await attempt(() => post("/api/import", body({ preview: true }), { patience: SLOW }));
  const place = document.getElementById("result");
  if (found === null) return place.replaceChildren();
  const some = found.items > 0;
  const drop = el("input", { type: "checkbox", on: { change: () => { add.disabled = !drop.checked; } } });
  const labels = el("input", { type: "checkbox" });
  const add = el("button", { type: "button", class: "main", disabled: !some || found.refused > 0, on: { click: () => commit(found.refused > 0, labels.checked) } }, t("import_add", { n: number(found.items) }));
  const tasks = Object.entries(found.tasks).map(([task, count]) => `${t(`task_${task}`)} ${number(count)}`).join(" · ");
  return place.replaceChildren(
    el("section", { class: "card" }, el("h2", {}, t("import_found")),
      el("p", {}, [t("import_counts", { records: number(found.records), items: number(found.items) }), tasks, found.repeated ? t("import_repeated", { n: number(found.repeated) }) : "", found.equal ? t("import_equal", { n: number(found.equal) }) : "", found.labels ? t("import_labels", { n: number(found.labels) }) : ""].filter(Boolean).join(" · ")),
      el("div", { class: "row end" }, found.labels > 0 && el("label", { class: "one-line" }, labels, el("span", {}, t("import_keep_labels", { n: found.labels }))), some && found.refused > 0 && el("label", { class: "one-line" }, drop, el("span", {}, t("import_drop_bad", { n: number(found.refused) }))), add)),
    ...(found.refused ? [el("section", { class: "card" }, el("h2", {}, t("import_errors", { n: number(found.refused) })), el("ul", { class: "errors" }, found.errors.map((error) => el("li", {}, error))),
      found.refused > found.errors.length && el("p", { class: "hint" }, t("import_more_errors", { n: number(found.refused - found.errors.length) })))] : []),
    el("h2", {}, some ? t("import_first", { n: number(found.first.length) }) : ""),
    ...found.first.map((item) => el("section", { class: "card" }, el("h2", {}, t(`task_${item.task}`)), prompt(short(item.prompt)), el("div", { class: "samples" }, item.answers.map((one) => el("div", { class: "card" }, answer(short(one))))))));
}

/** A prompt or an answer with the beginning of each long text, and how much more there is. */
function short(value) {
  if (Array.isArray(value)) return value.map(short);
  if (value !== null && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, short(part)]));
  if (typeof value !== "string" || value.length <= SHOWN) return value;
  const characters = [...value]; // code points, so that no emoji is cut
  if (characters.length <= SHOWN) return value;
  return `${characters.slice(0, SHOWN).join("")} ${t("import_more_characters", { n: number(characters.length - SHOWN) })}`;
}

async function commit(drop, labels) {
  const done = await attempt(() => post("/api/import", body({ drop, labels }), { patience: SLOW }));
  if (done === null) return;
  document.getElementById("result").replaceChildren(el("section", { class: "card link-made" }, el("strong", {}, t("import_done", { added: number(done.added) })),
    done.labels_added > 0 && el("span", { class: "hint" }, t("import_labels_added", { n: number(done.labels_added) })),
    done.added < done.items && el("span", { class: "hint" }, t("import_known", { n: number(done.items - done.added) }))));
  toast(t("import_done", { added: number(done.added) }));
  await earlier();
}
