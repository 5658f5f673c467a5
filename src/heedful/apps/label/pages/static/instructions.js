// Instructions for labellers, written by the owner; all versions are kept, and every label records its version.
import { get, post } from "./api.js";
import { el } from "./dom.js";
import { attempt, ready, start, toast } from "./shell.js";
import { fit } from "./tasks/writing.js";
import { t } from "./words.js";

const me = await start();
const given = me && await attempt(() => get("/api/instructions"));
if (given) draw(given, me.role === "owner");
ready();

function draw({ version, text }, may) {
  const box = el("textarea", { class: "writing", rows: "14", dir: "auto", aria: { label: t("page_instructions") }, on: { input: () => { fit(box); save.disabled = box.value === text; } } });
  const save = el("button", { type: "button", class: "main", disabled: true, on: { click: async () => {
    const reply = await attempt(() => post("/api/instructions", { text: box.value }));
    if (reply === null) return;
    draw(reply, may);
    toast(t("instructions_saved", { version: reply.version }));
  } } }, t("save_new_version"));
  box.value = text;
  document.getElementById("main").replaceChildren(
    el("div", { class: "page-head" }, el("h1", {}, t("page_instructions")), el("span", { class: "hint" }, t("instructions_v", { version }))),
    may ? el("section", { class: "card" }, el("p", { class: "hint" }, t("instructions_hint")), box, el("div", { class: "row end" }, save))
      : el("section", { class: "card" }, el("div", { class: "text", dir: "auto" }, text || t("no_instructions"))));
  if (may) fit(box);
}
